# %% after planning-11
assert identical

# %% after planning-15
if on_gpu:  # on a CPU, nothing runs beside anything else, and times are noise
    fits = [one for one in plans[1:] if one[peak] <= 1.02 * one[f"predicted {unit_name}"]]
    assert len(fits) == len(plans) - 1
