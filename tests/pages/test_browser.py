"""The site is built without a warning, and looks right in headless Chromium: phone, tablet and desktop, light and dark.

The site is built once and served on this machine. Each page is loaded once, in light, made narrower, and then turned
dark as when the system's choice changes. Where there is no browser, only the build is tested.
"""

import functools
import http.server
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

WIDTHS = (1400, 820, 390)
SMALLEST_PX = 9

SOURCES = [ROOT / "index.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]
PAGES = sorted(path.relative_to(ROOT).with_suffix(".html").as_posix() for path in SOURCES)
PAGES += ["genindex.html", "py-modindex.html", "search.html"]

# Faults of the page as it stands, at its present width. Text of drawings is as high as the drawing is scaled; the
# smallest in a notebook's bitmaps has 7 points at 100 dots per inch, which is 9.7 pixels, and 9 points in charts that
# are as narrow as phones.
LOOK = """async smallest => {
  const faults = [];
  await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
  for (const image of document.images) {
    const name = image.currentSrc.split("/").pop();
    if (!image.naturalWidth) faults.push(`broken image ${name}`);
    if (!image.alt) faults.push(`no alternative text for ${name}`);
    const shown = image.getBoundingClientRect().width;
    if (!shown) continue;
    let height = (image.matches(".fits-phones") ? 12.5 : 9.7) * shown / image.naturalWidth;
    if (name.endsWith(".svg")) {
      const text = await (await fetch(image.currentSrc)).text();
      const width = Number(text.match(/viewBox="0 0 ([\\d.]+)/)[1]);
      const sizes = [...text.matchAll(/font(?:-size)?:[^;"]*?([\\d.]+)px/g)].map(match => Number(match[1]));
      height = Math.min(...sizes) * shown / width;
    }
    if (height < smallest) faults.push(`text of ${height.toFixed(1)} px in ${name}`);
  }
  for (const text of document.querySelectorAll("article svg text")) {
    if (!text.getBoundingClientRect().width) continue;
    const height = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
    if (height < smallest) faults.push(`text of ${height.toFixed(1)} px: ${text.textContent}`);
  }
  await new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)));  // scripts have seen the width
  for (const box of document.querySelectorAll("pre, .table-wrapper, .output_area, .figure-box")) {
    const hidden = box.scrollWidth - box.clientWidth > 1;
    const isTable = box.querySelector("table") || box.matches(".table-wrapper") || /\\S {3,}\\S/.test(box.innerText);
    if (hidden && innerWidth >= 820 && !isTable && !box.querySelector(".as-drawn")) {
      faults.push(`scrolls and is no table: ${box.className} ${box.innerText.slice(0, 40)}`);
    }
    if (hidden !== box.classList.contains("goes-on")) faults.push(`does not say whether it goes on: ${box.className}`);
  }
  for (const code of document.querySelectorAll("div.highlight-python pre, div.input_area pre")) {
    const hidden = code.scrollWidth - code.clientWidth > 1;
    if (hidden) faults.push(`code scrolls sideways: ${code.textContent.trim().split("\\n")[0]}`);
  }
  for (const page of [document.documentElement, document.querySelector(".content")]) {
    if (page.scrollWidth > page.clientWidth) faults.push(`scrolls sideways: ${page.scrollWidth} > ${page.clientWidth}`);
  }
  return faults;
}"""

# A browser takes its time to choose the drawing for another width.
CHOSEN = """() => [...document.querySelectorAll("picture")].every(picture => {
  const image = picture.querySelector("img");
  const source = [...picture.querySelectorAll("source")].find(one => matchMedia(one.media).matches);
  return image.complete && image.currentSrc === new URL(source ? source.srcset : image.src, location).href;
})"""

TURNED = """() => {
  for (const one of document.getAnimations()) if (one instanceof CSSTransition) one.finish();
}"""

# Checking colours takes seconds for thousands of elements: of those that look alike, one is enough. A link that is told
# from the text around it by its colour looks as that text says.
MARK_LOOKS = """() => {
  const looks = new Set();
  for (const element of document.querySelectorAll("[data-look]")) element.removeAttribute("data-look");
  for (const element of document.querySelectorAll("article *")) {
    const link = element.matches("a[href]");
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!(text || link) || !element.getBoundingClientRect().width) continue;
    const style = getComputedStyle(element);
    let ground = element;
    while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
    const look = [style.color, style.fontSize, style.fontWeight, ground && getComputedStyle(ground).backgroundColor];
    if (link) look.push(style.textDecoration, style.border, getComputedStyle(element.parentElement).color);
    if (looks.has(look.join())) continue;
    looks.add(look.join());
    element.setAttribute("data-look", "");
  }
  return looks.size;
}"""
# All rules at once share what axe finds out of the page. Its answer says far more than what is looked at.
AXE = """async runOnly => {
  const marked = {"color-contrast": "[data-look]", "link-in-text-block": "a[href][data-look]"};
  axe.configure({rules: Object.entries(marked).map(([id, selector]) => ({id, selector}))});
  const context = runOnly ? {include: [["[data-look]"]]} : document;
  const {violations} = await axe.run(context, {resultTypes: ["violations"], ...(runOnly && {runOnly})});
  return violations.filter(found => ["serious", "critical"].includes(found.impact)).map(found => {
    const shown = found.nodes.slice(0, 3).map(node => node.html.slice(0, 120)).join("; ");
    return `axe: ${found.id}, ${found.nodes.length} times: ${shown}`;
  });
}"""
COLORS = ["color-contrast"]

_logger = logging.getLogger(__name__)

FIRST_HITS = {
    "CUDA out of memory": "docs/out_of_memory.html",
    "nothing was offloaded": "docs/reference/troubleshooting.html",
    "min_bytes": "docs/howto/budget.html",
    "pinned memory": "docs/explanation/limits.html",
    "RTX 4090": "docs/will_it_fit.html",
    "Windows": "docs/installation.html",
    "glossary": "docs/reference/glossary.html",
    "128k": "docs/howto/long_context.html",
    "FSDP": "docs/howto/trainers.html",
    "DeepSpeed": "docs/explanation/comparison.html",
    "error": "docs/reference/troubleshooting.html",
    "LoRA": "docs/howto/trainers.html",
    "pipeline parallel": "docs/howto/pipeline.html",
    "torch.compile": "docs/explanation/limits.html",
    "optimizer state": "docs/howto/recipe.html",
    "benchmark": "docs/benchmarks.html",
    "install": "docs/installation.html",
    "tutorial": "notebooks/01_basic.html",
    "cpu offload": "docs/quickstart.html",
    "multi gpu": "docs/howto/trainers.html",
    "A100": "docs/explanation/hardware.html",
    "ROCm": "docs/installation.html",
    "Llama-3-8B": "docs/howto/worked.html",
    "FSDP2 out of memory": "docs/howto/worked.html",
    "full fine-tune": "docs/howto/recipe.html",
    "gradient checkpointing": "docs/howto/migrate.html",
    "gradient accumulation": "docs/howto/recipe.html",
    "region": "docs/howto/budget.html",
    "prefetch": "docs/reference/glossary.html",
    "how many layers": "docs/explanation/hardware.html",
    "prepare": "docs/howto/recipe.html",
    "max_grad_norm": "docs/howto/trainers.html",
}
"""What readers type → the page that answers it, which must be the first hit."""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for many files

    def end_headers(self):
        self.send_header("Cache-Control", "max-age=3600")  # the pages' common files are asked for once
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site's folder and its build, from nothing but what the repository holds: notebooks as they are stored."""
    folder = tmp_path_factory.mktemp("site")
    # As ``python -m sphinx`` does, without looking through all it has made again and again: a quarter of the time.
    program = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
    build = [sys.executable, "-c", program, "-n", "-W", "--keep-going", "-q", ".", str(folder)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(build, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1000, check=False)
    return folder, done


def test_builds_without_a_warning(site):
    """As ``make docs`` does, but always from the start."""
    _, done = site
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """Where the site is served."""
    folder, _ = site
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Reader:
    """A browser's tab, and what went wrong in it."""

    def __init__(self, browser, address: str) -> None:
        self.address = address
        self.page = browser.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda said: said.type == "error" and self.faults.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("request", self._asked)

    def _asked(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.faults.append(f"asks another server: {request.url}")

    def open(self, name: str) -> None:
        self.faults.clear()
        self.page.emulate_media(color_scheme="light")
        self.page.goto(self.address + name)

    def turn(self, theme: str) -> None:
        """Let the system's choice be this theme, and wait until the last colour has changed."""
        self.page.emulate_media(color_scheme=theme)
        self.page.evaluate(TURNED)

    def widen(self, width: int) -> None:
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.wait_for_function(CHOSEN)

    def axe(self, rules: list[str] | None = None) -> None:
        """Have axe look at the page, by all rules or some; its colours count as serious."""
        if self.page.evaluate(MARK_LOOKS) or rules is None:
            self.faults += self.page.evaluate(AXE, rules)


@pytest.fixture(scope="module")
def reader(browser, address) -> Reader:
    return Reader(browser, address)


@pytest.fixture(scope="module")
def axe() -> str:
    axe_package = pytest.importorskip("axe_playwright_python")
    return (Path(axe_package.__file__).parent / "axe.min.js").read_text("utf-8")


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", PAGES)
def test_page(reader, axe, name):
    reader.widen(WIDTHS[0])
    reader.open(name)
    reader.page.evaluate(axe)
    for width in WIDTHS:
        reader.widen(width)
        reader.faults += [f"{width} px: {fault}" for fault in reader.page.evaluate(LOOK, SMALLEST_PX)]
    reader.axe()
    reader.turn("dark")  # which changes colours, and nothing else
    reader.axe(COLORS)
    assert not reader.faults, f"{name}:\n" + "\n".join(reader.faults)


def test_a_fault_is_seen(reader, axe):
    reader.widen(390)
    reader.open("index.html")
    reader.page.evaluate("""() => {
      const article = document.querySelector("article");
      article.insertAdjacentHTML("beforeend", `<img src="missing.png"><div style="width: 800px">wide</div>
        <svg viewBox="0 0 100 10" width="100"><text y="9" font-size="5">small</text></svg>
        <p style="color: #eee; background: #fff">pale</p>
        <p style="color: #333; background: #fff">words with a
          <a href="#a" style="color: #343; text-decoration: none">link</a> in them</p>`);
      console.error("said");
    }""")
    reader.faults += reader.page.evaluate(LOOK, SMALLEST_PX)
    reader.page.evaluate(axe)
    reader.axe()
    found = "\n".join(reader.faults)
    in_words = ["said", "broken image", "no alt", "sideways", "text of 5.0 px: small"]
    for words in (*in_words, "image-alt", "color-contrast", "link-in-text-block"):
        assert words in found, words


def test_folded_code_opens_by_keyboard_and_without_scripts(reader, address):
    context = reader.page.context.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}notebooks/01_basic.html")
    [code] = page.locator("details.folded-code").all()
    assert not code.locator("pre").last.is_visible()
    code.locator("summary").press("Enter")
    assert code.locator("pre").last.is_visible()
    context.close()


# Moves a slider back and forth, waits for each answer and its curve, and says how long each answer took.
MOVE_SLIDER = """async name => {
  const root = document.getElementById("planner"), slider = document.getElementById(`planner-${name}`), took = [];
  const once = async found => { while (!found()) await new Promise(resolve => setTimeout(resolve, 1)); };
  for (let move = 0; move < 4; move++) {
    const before = root.dataset.answer;
    slider.value = Number(slider.value) + (move % 2 ? 1 : -1);
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    await once(() => root.dataset.answer !== before);
    took.push(Number(root.dataset.took));
    await once(() => root.dataset.state === "done");
  }
  return took;
}"""


@pytest.mark.parametrize(
    ("preset", "layers"),
    [("decoder", 8), *(pytest.param(preset, 32, marks=pytest.mark.nightly) for preset in ("decoder", "llama_8b"))],
)
def test_the_planner_answers_each_move_of_a_slider(reader, preset, layers):
    """How long that takes with 32 layers is for people: ``pytest --log-cli-level=INFO`` shows it."""
    reader.open(
        f"docs/will_it_fit.html?{preset}{layers}#planner?preset={preset}&layers={layers}"
    )  # another address loads the page anew
    for name in ("memory", "tokens"):
        reader.page.wait_for_selector("#planner[data-state=done]")
        took = reader.page.evaluate(MOVE_SLIDER, name)
        assert len(took) == 4
        _logger.info("%s, %s: %s ms, at most %s", preset, name, sorted(took)[2], max(took))
    assert not reader.faults


# Types the next words into the address of the page that is open, with the index in memory, and shows no hit's own page.
SEARCH_AGAIN = """words => {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
  history.replaceState(null, "", `search.html?q=${encodeURIComponent(words)}`);
  document.getElementById("search-results").replaceChildren();
  Search.performSearch(words);
}"""


def first_hit(reader):
    first = reader.page.locator("#search-results ul.search li a").first
    first.wait_for(timeout=20_000)
    return first.evaluate("link => link.href").removeprefix(reader.address).split("?")[0].split("#")[0]


def test_search_finds_first(reader):
    """The first words as a reader of another page asks for them, the others one after the other."""
    found = {}
    for words in FIRST_HITS:
        if found:
            reader.page.evaluate(SEARCH_AGAIN, words)
        else:
            reader.open(f"search.html?q={words.replace(' ', '+')}")
        found[words] = first_hit(reader)
    assert found == FIRST_HITS
