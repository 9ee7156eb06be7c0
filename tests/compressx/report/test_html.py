from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.compressx.report.reports import Page, layer, report

from compressx.api.record import (
    AllocationReport,
    BlockReport,
    FinetuneReport,
    ReconstructionReport,
    RunReport,
    UnitReport,
)
from compressx.pipeline.stages import sections
from compressx.report import figures
from compressx.report.html import to_html

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run_in(folder: Path) -> RunReport:
    """Write figures as a run does, and return the report that names them."""
    blocks, kept = [], []
    for index in range(12):
        fqn, layers = f"model.layers.{index}", []
        shared = {"attention_error": 0.01 + index / 90, "attention_error.wanda": 0.1 + index / 50}
        curve = {"loss": tuple(1 / (1 + step) for step in range(20))}
        for number, kind in enumerate(KINDS):
            name = f"{fqn}.{'self_attn' if kind[0] in 'qkvo' else 'mlp'}.{kind}"
            one = layer(name, pruner="sparsegpt", sparsity=0.2 + 0.1 * number, seconds=0.5 + index, damping=0.01)
            layers.append(replace(one, pruner="attnprune", info=shared, history=curve) if kind in KINDS[:2] else one)
        before = 0.2 + index / 50
        trained = ReconstructionReport(before, 0.1, (before, 0.1), 3.0)
        blocks.append(BlockReport(index, fqn, tuple(layers), 9.0 + index, 0.01 * (1 + index), trained))
        if index < 2:
            image = torch.rand(64, 64, generator=torch.Generator().manual_seed(index))
            pair = [replace(one, group=layers[0].name) for one in layers[:2]]
            kept += figures.matrices(pair, {one.name: {"dense": image, "pruned": image.sqrt()} for one in pair})
    units = tuple(
        UnitReport(r.fqn, "sparsegpt", tuple(x.name for x in r.layers), 1000, 0.5, 0.01, (0.3, 0.5), (0.1, 0.2))
        for r in blocks
    )
    made = report(
        blocks=tuple(blocks),
        model={"path": "/somewhere/a-folder-with-a-name-that-is-long-enough-to-need-more-than-one-line-on-a-phone"},
        skipped=({"name": "lm_head", "reason": "not named <by> a rule"},),
        evaluation={"dense": {"token_perplexity": 29.16}, "pruned": {"token_perplexity": 36.63}},
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


def test_the_page_is_one_file_that_fetches_nothing_and_closes_every_element(shown):
    page = Page(shown[1].read_text(encoding="utf-8"))
    assert page.links
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    text = shown[1].read_text()
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    assert page.open == []
    words = ("+25.6%", "model.layers.11.mlp.down_proj", "attention_error by decoder block", "not named <by> a rule",
             "Held-out error of each decoder block's output", "prune: [<all>]", "84 pruned linears")  # fmt: skip
    assert [word for word in words if word not in page.text] == []
    assert len(set(page.ids)) == len(page.ids)


def test_experts_are_averaged_by_their_weights_and_what_lies_outside_has_a_row_of_its_own(tmp_path):
    expert = "model.layers.0.mlp.experts.down_proj"
    experts = (layer(f"{expert}.0", rows=10, sparsity=0.2), layer(f"{expert}.1", rows=30, sparsity=0.6))
    blocks = (
        BlockReport(0, "model.layers.0", experts, 2.0),
        BlockReport(1, "", (layer("lm_head", sparsity=0.25),), 4.0),
    )
    text = to_html(sections(report(blocks=blocks)), tmp_path)
    rows = re.findall(r'<tr><th scope="row">(\w+)</th>(.*?)</tr>', text)
    heat = {block: re.findall(r">([\d.]+%)<", cells) for block, cells in rows if 'class="heat"' in cells}
    assert heat == {"0": ["50.0%"], "outside": ["25.0%"]}


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


@pytest.fixture
def opened(browser):
    """Open a page with everything unfolded, at a width, and return it with the requests that it makes."""
    contexts = []

    def at(path, width, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        contexts[-1].set_default_timeout(0)  # on a busy machine its 30 seconds are no fault; pytest's own limit stays
        page, requests = contexts[-1].new_page(), []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
        return page, requests

    yield at
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_nothing_overflows_overlaps_or_breaks_on_any_screen_and_text_is_legible(opened, shown, width, scheme, tmp_path):
    from PIL import Image

    page, requests = opened(shown[1], width, scheme)
    page.evaluate("Promise.all([...document.images].map(e => { e.loading = 'eager'; return e.decode(); }))")
    assert page.evaluate(OVERLAPS) == page.evaluate(BROKEN) == []
    assert {name: ratio for name, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5} == {}
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    with Image.open(tmp_path / "page.png") as image:
        mean = sum(image.convert("L").resize((16, 16)).tobytes()) / 256
    assert (mean > 128) == (scheme == "light")
