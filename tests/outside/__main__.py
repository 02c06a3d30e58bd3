"""The complete runs: all operations, architectures, random programs, trainings, budgets.

Each writes its record into ``results/``.
"""

import argparse
import json
import os
import platform
import subprocess
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .architectures import architectures as find_architectures
from .budgets import TOLERANCE as BUDGET_TOLERANCE
from .budgets import check as check_budget
from .operations import DTYPES, KINDS, differentiable
from .programs import check as check_program
from .programs import draw as draw_program
from .trainings import check as check_training
from .trainings import draw as draw_training
from .workers import run_cases

RESULTS = Path(__file__).resolve().parents[2] / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.outside", description=__doc__)
    commands = parser.add_subparsers(required=True)
    operations = commands.add_parser("operations", help="PyTorch's operations and modules")
    operations.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    operations.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    operations.add_argument("--names", nargs="+", help="only these")
    operations.add_argument("--seed", type=int, default=0, help="what the sample inputs are drawn with")
    operations.add_argument("--most", type=int, help="samples of one operation, chosen with the seed; by default all")
    operations.add_argument("--limit-s", type=float, default=600, help="longest time for one operation")
    operations.add_argument("--record", type=Path, default=RESULTS / "outside_ops.json")
    operations.set_defaults(run=run_operations)
    architectures = commands.add_parser("architectures", help="Hugging Face's architectures")
    architectures.add_argument("--names", nargs="+", help="only these")
    architectures.add_argument("--missing", action="store_true", help="only those that the record does not have")
    architectures.add_argument("--limit-s", type=float, default=300, help="longest time for one architecture")
    architectures.add_argument("--record", type=Path, default=RESULTS / "outside_architectures.json")
    architectures.set_defaults(run=run_architectures)
    programs = commands.add_parser("programs", help="random layers, policies and training loops")
    programs.set_defaults(check=check_program, draw=draw_program, kinds=_kinds_of_program)
    trainings = commands.add_parser("trainings", help="random trainings with streamed optimizers, weights and recipes")
    trainings.set_defaults(check=check_training, draw=draw_training, kinds=lambda training: [training["way"]])
    for name, command in (("programs", programs), ("trainings", trainings)):
        command.add_argument("--first", type=int, default=0, help="the first seed")
        command.add_argument("--number", type=int, default=2000, help="how many seeds")
        command.add_argument("--record", type=Path, default=RESULTS / f"outside_{name}.json")
        command.set_defaults(run=run_random, name=name)
    budgets = commands.add_parser("budgets", help="random models on the CPU under random budgets")
    budgets.add_argument("--first", type=int, default=0, help="the first seed")
    budgets.add_argument("--number", type=int, default=40, help="how many models")
    budgets.add_argument("--microbatches", type=int, default=1, help="how many there are in a step")
    budgets.add_argument("--varying", action="store_true", help="their lengths vary")
    budgets.add_argument("--in-flight", action="store_true", help="some steps have them at once, the others have one")
    budgets.add_argument("--record", type=Path, default=RESULTS / "outside_budgets.json")
    budgets.set_defaults(run=run_budgets)
    for command in (operations, architectures):
        command.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many run at a time")
    options = parser.parse_args()
    options.run(options)


def run_operations(options: argparse.Namespace) -> None:
    """All samples of all operations, in each type of number that they have gradients in."""
    record = {"runs": read(options.record).get("runs", {})}
    for dtype in options.dtypes:
        for kind in options.kinds:
            names = differentiable(kind, dtype)
            wanted = [name for name in names if not options.names or name in options.names]
            cases = [(kind, name, dtype, options.seed, options.most) for name in wanted]
            origin = origin_now(seed=options.seed, most_samples_of_one=options.most)
            summary = summarise(
                run_cases("operations.check", cases, options.limit_s, options.processes), f"{kind} {dtype}"
            )
            record["runs"][f"{kind} {dtype}"] = origin | summary
            write(record, options.record)


def run_architectures(options: argparse.Namespace) -> None:
    """All architectures that can be built with small numbers."""
    import transformers

    known = find_architectures()
    found = read(options.record).get("architectures", {})
    names = options.names or [name for name in known if not (options.missing and name in found)]
    origin = origin_now(transformers=transformers.__version__)
    cases = [(name, known[name]) for name in names]
    for (name, _), report in run_cases("architectures.check", cases, options.limit_s, options.processes):
        found[name] = {key: value for key, value in report.items() if value} | {"commit": origin["commit"]}
        for key in ("different", "unrepeatable", "lost", "skipped"):
            if report.get(key):
                print(f"{name}: {key}: {report[key]}", flush=True)
        write(origin | {"counts": count(found), "architectures": dict(sorted(found.items()))}, options.record)
    print(count(found))


def run_random(options: argparse.Namespace) -> None:
    """Random programs or trainings, one per seed: those that differ from plain PyTorch or fail where it works."""
    origin = origin_now(first_seed=options.first)
    counts: Counter[str] = Counter()
    same_by: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for number in range(options.number):
        seed = options.first + number
        found = options.check(seed)
        kind = (found or "same").partition(":")[0]
        kind = kind if kind in ("same", "skipped", "refused") else "wrong"
        counts[kind] += 1
        same_by.update(options.kinds(options.draw(seed)) if kind == "same" else ())
        if kind == "wrong":
            wrong[str(seed)] = str(found)
            print(f"{seed}: {found}", flush=True)
        if number % 100 == 99 or number == options.number - 1:
            print(dict(counts), flush=True)
            found_so_far = {options.name: number + 1, **counts, "same_by": same_by, "wrong_seeds": wrong}
            write(origin | found_so_far, options.record)


def _kinds_of_program(program: dict[str, Any]) -> list[str]:
    return [program["decided"], *(["streamed weights"] if program["stream"] else [])]


def run_budgets(options: argparse.Namespace) -> None:
    """Random models under random budgets: the peak of each, by ``memory_budget`` and by ``plan``, as fractions."""
    rows = []
    for seed in range(options.first, options.first + options.number):
        report = check_budget(seed, options.microbatches, varying=options.varying, in_flight=options.in_flight)
        row = asdict(report) | {key: getattr(report, key) / report.budget for key in ("peak", "highest", "planned")}
        rows.append(row)
        print(f"{seed}: {row['peak']:.3f} {row['planned']:.3f} {report.wrong or len(report.messages)}", flush=True)
    held = sum(row["peak"] <= 1 + BUDGET_TOLERANCE for row in rows)
    held_by_plan = sum(0 < row["planned"] <= 1 + BUDGET_TOLERANCE for row in rows)
    wrong = sum(bool(row["wrong"]) for row in rows)
    counts = {"models": len(rows), "held": held, "held_by_plan": held_by_plan, "wrong": wrong}
    print(counts)
    settings = {key: vars(options)[key] for key in ("microbatches", "varying", "in_flight")}
    write(origin_now(first_seed=options.first, **settings) | counts | {"rows": rows}, options.record)


def count(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many architectures came to what."""
    counts = {"known": len(find_architectures()), "checked": sum("runs" in report for report in found.values())}
    counts["runs"] = sum(report.get("runs", 0) for report in found.values())
    for key in ("different", "unrepeatable", "lost", "skipped"):
        counts[key] = sum(key in report for report in found.values())
    return counts


def summarise(results: Any, what: str) -> dict[str, Any]:
    """Add up the reports of operations, and say on the way what is worth a look."""
    counts = {"operations": 0, "samples": 0, "runs": 0, "moved": 0, "failed_without": 0, "seconds": 0.0}
    named: dict[str, dict[str, Any]] = {"different": {}, "unrepeatable": {}, "lost": {}, "skipped": {}}
    for (_, name, *_), report in results:
        if "does not support NJT" in report.get("skipped", ""):
            continue  # PyTorch lists all operations for nested tensors, also where it has no samples
        counts["operations"] += 1
        for key in counts.keys() & report.keys():
            counts[key] += report[key]
        if report.get("unrepeatable"):
            named["unrepeatable"][name] = {"runs": len(report["unrepeatable"]), "one": report["unrepeatable"][0]}
        for key in ("different", "lost", "skipped"):
            if report.get(key):
                named[key][name] = report[key]
                print(f"{what} {name}: {key}: {report[key]}", flush=True)
        if counts["operations"] % 50 == 0:
            print(f"{what}: {counts['operations']} done", flush=True)
    counts["seconds"] = round(counts["seconds"], 1)
    print(f"{what}: {counts}, " + ", ".join(f"{len(found)} {key}" for key, found in named.items()), flush=True)
    return counts | named


def origin_now(**settings: Any) -> dict[str, Any]:
    """When and with what a result was found."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **settings,
    }


def read(path: Path) -> dict[str, Any]:
    """An earlier record, of which a command replaces what it runs; empty if there is none."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record


def write(record: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
