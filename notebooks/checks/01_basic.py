# %% after basic-07
assert offloaded_bytes < 0.9 * kept_bytes, "4 of 20 layers should save well over a tenth"

# %% after basic-09
assert identical

# %% after basic-15
assert curve[-1][f"peak {unit_name}"] < 0.5 * curve[0][f"peak {unit_name}"]

# %% after basic-19
stats = context.stats()
assert stats.offloaded_bytes == stats.reloaded_bytes > 0
assert stats.late_reloads == 0

# What `make tutorial` prints.
import json
from pathlib import Path

result = [{**row, "gradients": "bit-identical"} for row in rows] + [
    {
        "offloaded layers": row["offloaded layers"],
        f"peak {unit_name}": row[f"peak {unit_name}"],
        "step ms": row["step ms"],
        "gradients": "",
    }
    for row in curve
    if row["offloaded layers"]
]
if "OFFLOAD_TUTORIAL_RESULT" in os.environ:
    Path(os.environ["OFFLOAD_TUTORIAL_RESULT"]).write_text(json.dumps(result))
