# %% after long-plan-5
assert handle.plan is not None
assert not on_gpu or meter.peak_bytes <= budget

# %% after long-29
assert gains["as it is"] < gains["loss without logits"] < gains["checkpointing"] < gains["MLPs in tiles"]
assert gains["MLPs in tiles"] <= gains["weights streamed"]

# %% after long-31
exact = [row["ingredient"] for row in rows[1:] if row["apart"] == 0]
assert exact == ["checkpointing", "inputs offloaded", "attention's outputs, too", "weights streamed"]
assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 1e-2
