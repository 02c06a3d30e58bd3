# %% after tune-05
assert parts["moments"] == 4 * parts["weights"] == 4 * parts["gradients"]
assert parts["activations"] > parts["moments"]

# %% after tune-16
assert prepared.recipe.optimizer == "streamed"
assert prepared.plan.recipes[0].reason

# %% after tune-18
assert all(row["same parameters"] for row in rows)
peaks = [row[f"peak {unit_name}"] for row in rows]
assert peaks[0] > 2 * 24
assert sorted(peaks[:4], reverse=True) == peaks[:4], (
    "each further part that is moved makes the peak smaller"
)
assert peaks[3] < peaks[-1]
assert peaks[-1] <= 24 or prepared.recipe.weights == "streamed"  # then its weights are counted too often
