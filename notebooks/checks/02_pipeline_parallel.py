# %% after pipeline-27
assert half.peak_bytes_without == without_bytes
assert half.peak_bytes <= without_bytes // 2

# %% after pipeline-18
assert derived.peak_bytes < 0.75 * kept.peak_bytes, "the peak of the whole step is lower now"
assert derived_context[0].stats().late_reloads == 0

# %% after pipeline-21
assert identical

# %% after pipeline-11
refused = False
try:
    offload.Schedule.from_synchronization_dict({**moves, 3: (True, 6, True, 4)}, MICROBATCHES, order)
except ValueError:
    refused = True
assert refused, "this dictionary should be refused"

# %% after pipeline-15
assert both_s > 0 or not on_gpu  # on the CPU, copies may be too short to meet
stats = context[0].stats()
assert stats.offloaded_bytes == stats.reloaded_bytes > 0
assert stats.late_reloads == 0
assert same_gradients(run_dictionary)

# %% after pipeline-23
fill, steady, drain = [key for key in rows[0] if key.endswith(unit_name)]
dictionary, hand = rows[2], rows[3]
assert dictionary[steady] < 0.7 * rows[0][steady], "two sets in place of four"
assert dictionary[fill] > 0.8 * rows[0][fill], "before B0 nothing is released"
assert hand_context.stats().offloaded_bytes == stats.offloaded_bytes
assert hand[steady] < 0.7 * rows[0][steady]
assert same_gradients(run_by_hand)
