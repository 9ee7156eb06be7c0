from __future__ import annotations

import dataclasses
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from compressx.api.record import (
    AllocationReport,
    BlockReport,
    FinetuneReport,
    LayerReport,
    ReconstructionReport,
    RunReport,
    UnitReport,
    total_sparsity,
)
from compressx.pipeline.stages import sections
from compressx.report import figures
from compressx.report.html import to_html

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run_in(folder: Path) -> RunReport:
    """Write figures as a run does, and return the report that names them."""
    reports, kept = [], []
    for index in range(12):
        layers = []
        shared = {"attention_error": 0.01 + index / 90, "attention_error.wanda": 0.1 + index / 50}
        curve = {"loss": tuple(1 / (1 + step) for step in range(20))}
        for number, kind in enumerate(KINDS):
            part = "self_attn" if kind[0] in "qkvo" else "mlp"
            pair = kind in KINDS[:2]
            layers.append(
                LayerReport(
                    f"model.layers.{index}.{part}.{kind}", "attnprune" if pair else "sparsegpt", "50% row", (64, 64),
                    0.5, 0.2 + 0.1 * number, 0.5 + index, shared if pair else {"damping": 0.01}, curve if pair else {},
                )
            )  # fmt: skip
        trained = ReconstructionReport(0.2 + index / 50, 0.1, (0.2 + index / 50, 0.1), 3.0)
        reports.append(
            BlockReport(index, f"model.layers.{index}", tuple(layers), 9.0 + index, 0.01 * (1 + index), trained)
        )
        image = torch.rand(64, 64, generator=torch.Generator().manual_seed(index))
        images = {"dense": image, "pruned": image.sqrt()}
        if index < 2:
            of = layers[0].name
            pair = [replace(layer, group=of) for layer in layers[:2]]
            kept += figures.matrices(pair, {layer.name: images for layer in pair})
    units = tuple(
        UnitReport(r.fqn, "sparsegpt", tuple(x.name for x in r.layers), 1000, 0.5, 0.01, (0.3, 0.5), (0.1, 0.2))
        for r in reports
    )
    made = RunReport(
        compressx="0.1.0",
        model={"path": "/somewhere/a-folder-with-a-name-that-is-long-enough-to-need-more-than-one-line-on-a-phone"},
        sparsity=total_sparsity(layer for report in reports for layer in report.layers),
        blocks=tuple(reports),
        skipped=({"name": "lm_head", "reason": "not named <by> a rule"},),
        evaluation={"dense": {"token_perplexity": 29.16}, "pruned": {"token_perplexity": 36.63}},
        seconds={"load": 1.0, "prune": 120.0, "total": 240.0},
        peak_memory_bytes=2**31,
        plugins=({"name": "wanda", "version": None, "source": "entry point", "module": "compressx.pruners.wanda"},),
        versions={"torch": "2.13.0"},
        allocation=AllocationReport("divergence", 0.5, "block", 1000, 500, units),
        finetune=FinetuneReport("dense", 1000, 2, (16, 64), (2.0, 1.0)),
    )
    return replace(made, figures=figures.draw(made, kept, folder / "plots"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, Path]:
    folder = tmp_path_factory.mktemp("run")
    report = run_in(folder)
    path = folder / "report.html"
    path.write_text(to_html(sections(report, "model: m\nprune: [<all>]\n"), folder), encoding="utf-8")
    return report, path


class Page(HTMLParser):
    """What a page links to, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values: dict[str, Any] = dict(attrs)
        self.links += [values[k] for k in ("src", "href", "xlink:href") if k in values]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in ("meta", "img", "br", "wbr", "path", "use", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use", "rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_that_fetches_nothing_and_closes_every_element(shown):
    page = Page(shown[1])
    assert page.links
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    text = shown[1].read_text()
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)


def test_everything_a_run_tells_is_on_the_page(shown):
    report, path = shown
    text = Page(path).text
    words = ("29.16", "36.63", "+25.6%", "attnprune", "model.layers.11.mlp.down_proj", "divergence, by block", "torch")
    for word in words:
        assert word in text, word
    assert "Held-out error of each decoder block's output" in text
    assert "attention_error by decoder block" in text
    assert "prune: [<all>]" in text
    assert "not named <by> a rule" in text
    assert text.count("80.0%") >= 12  # down_proj of every block
    assert f"{len(report.layers)} pruned linears" in text


def test_experts_are_averaged_by_their_weights_and_what_lies_outside_has_a_row_of_its_own(shown, tmp_path):
    def expert(number: int, rows: int, sparsity: float) -> LayerReport:
        name = f"model.layers.0.mlp.experts.down_proj.{number}"
        return LayerReport(name, "wanda", "50% row", (rows, 10), 0.5, sparsity, 1.0)

    head = LayerReport("lm_head", "wanda", "50% row", (10, 10), 0.5, 0.25, 3.0)
    blocks = (
        BlockReport(0, "model.layers.0", (expert(0, 10, 0.2), expert(1, 30, 0.6)), 2.0),
        BlockReport(1, "", (head,), 4.0),
    )
    report = dataclasses.replace(shown[0], blocks=blocks, figures=(), allocation=None, finetune=None, evaluation={})
    text = to_html(sections(report), tmp_path)
    rows = re.findall(r'<tr><th scope="row">(\w+)</th>(.*?)</tr>', text)
    heat = {block: re.findall(r">([\d.]+%)<", cells) for block, cells in rows if 'class="heat"' in cells}
    assert heat == {"0": ["50.0%"], "outside": ["25.0%"]}
    for absent in ("Allocation", "Block reconstruction", "Fine-tuning", "Errors and curves", "Dense against pruned"):
        assert f"<h2>{absent}" not in text


OVERLAPS = """
() => {
  const wide = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > wide) found.push('the page scrolls sideways');
  const inside = e => e.closest('.scroll, svg, pre');
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect();
    if (!inside(e) && box.width && box.right > wide + 1) found.push(`${e.tagName} ends at ${box.right} of ${wide}`);
    if (e.children.length === 0 && !inside(e) && e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
      found.push(`${e.tagName} cuts off ${e.textContent.slice(0, 40)}`);
  }
  const blocks = [...document.querySelectorAll('h1, h2, .card, figure, tr, .scroll, pre, summary, main p')];
  const boxes = blocks.map(e => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, p] = boxes[i], [b, q] = boxes[j];
    if (a.contains(b) || b.contains(a)) continue;
    if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
      found.push(`${a.tagName} ${a.textContent.slice(0, 20)} covers ${b.tagName} ${b.textContent.slice(0, 20)}`);
  }
  return found;
}
"""

CONTRASTS = """
() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true}), known = {};
  const channels = colour => {
    if (known[colour]) return known[colour];
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return known[colour] = [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = rgb => rgb.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] / 255 + below[i] * (1 - top[3] / 255));
  const ground = e => {
    const path = []; for (let x = e; x; x = x.parentElement) path.unshift(x);
    return path.reduce((below, x) => over(channels(getComputedStyle(x).backgroundColor), below), [255, 255, 255]);
  };
  const worst = {};
  for (const e of document.querySelectorAll('h1, p, td, th, b, figcaption, summary, pre, svg text')) {
    if (!e.textContent.trim() || !e.getBoundingClientRect().width) continue;
    const style = getComputedStyle(e), ink = channels(e.closest('svg') ? style.fill : style.color);
    const pair = [light(ink), light(ground(e))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05), name = e.closest('svg') ? 'svg text' : e.tagName;
    worst[name] = Math.min(worst[name] ?? 99, ratio);
  }
  return worst;
}
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium; on Debian: apt install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev dependencies")
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium refuses its sandbox to root
    with sync_api.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield launched
        launched.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_nothing_overflows_or_overlaps_on_any_screen_and_text_is_legible(browser, shown, width, scheme, tmp_path):
    from PIL import Image

    requests = []
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(0)  # on a busy machine its 30 seconds are no sign of a fault; pytest's own limit stays
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.goto(shown[1].as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    page.evaluate("Promise.all([...document.images].map(e => { e.loading = 'eager'; return e.decode(); }))")
    assert page.evaluate(OVERLAPS) == []
    assert {name: ratio for name, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5} == {}
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    context.close()
    with Image.open(tmp_path / "page.png") as image:
        mean = sum(image.convert("L").resize((16, 16)).tobytes()) / 256
    assert (mean > 128) == (scheme == "light")


SEEN = """
() => [...document.querySelectorAll('section')].find(e => e.textContent.includes('Dense against pruned'))
  .querySelectorAll('th').values().filter(e => e.getBoundingClientRect().right <= document.documentElement.clientWidth)
  .map(e => e.textContent).toArray()
"""


BROKEN = """
() => {
  const broken = [], range = document.createRange();
  for (const cell of document.querySelectorAll('th, td:not(.prose)')) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[^\\s-]+/g)) {
      range.setStart(texts.currentNode, word.index); range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}
"""


@pytest.mark.parametrize("width", [400, 1280])
def test_no_word_of_a_table_is_broken_and_long_tables_have_the_page_for_themselves(browser, shown, width):
    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(0)
    page = context.new_page()
    page.goto(shown[1].as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate(BROKEN) == []
    beside = (
        "() => [...document.querySelectorAll('section')].filter(e => e.querySelectorAll('tr').length > 13 && "
        "e.clientWidth < document.querySelector('main').clientWidth).map(e => e.textContent)"
    )
    assert page.evaluate(beside) == []
    context.close()


def test_a_phone_shows_the_result_without_scrolling(browser, shown, tmp_path):
    measured = {"token_perplexity": 29.16, "arc_challenge": {"acc_norm": 0.4123, "acc_norm_stderr": 0.0144}}
    evaluation = dict.fromkeys(("dense", "pruned", "finetuned"), measured)
    report = dataclasses.replace(shown[0], evaluation=evaluation, figures=())
    path = tmp_path / "report.html"
    path.write_text(to_html(sections(report), tmp_path), encoding="utf-8")
    context = browser.new_context(viewport={"width": 400, "height": 800})
    context.set_default_timeout(0)
    page = context.new_page()
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate(SEEN)[:4] == ["measure", "dense", "finetuned", "change"]
    assert page.evaluate(OVERLAPS) == []
    context.close()
