"""The pages of docs/ say what the package says, and README's blocks run."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

import h2o_prefill
from h2o_prefill.hf import call, forward, kinds, report

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [path for folder in (ROOT, DOCS, ROOT / "benchmarks") for path in folder.glob("*.md")]
BOOK = ROOT / "tests/python/eval/struggle_for_existence.txt"

REASONS = [
    *(call.TRACED, call.NOT_ENABLED, call.TRAINING, call.WEIGHTS, call.WINDOWS, call.NO_STATE),
    *(forward.MASK, forward.PADDED, forward.CHANGED, forward.NO_IDS),
    *(kinds.NO_INDEX, kinds.UNSUPPORTED, report.EMPTY),
]


def prose(page):
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def words(text):
    return re.sub(r"[`*\s]+", " ", text)


@pytest.mark.parametrize("reason", REASONS)
def test_the_faq_has_every_reason_for_dense_attention(reason):
    # The text after a semicolon is advice already.
    assert words(reason.split(";")[0]) in words((DOCS / "faq.md").read_text())


def test_the_api_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    documented = set(re.findall(r"^::: [\w.]*?(\w+)$", page, flags=re.MULTILINE))
    linked = {"PRESETS", "distributed", "reference"}
    assert linked <= set(re.findall(r"`(\w+)`", page))
    assert documented >= set(h2o_prefill.__all__) - linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_of_pages_lead_somewhere_in_the_repository(page):
    text = prose(page)
    for target, _, anchor in re.findall(r"\]\(((?!https?:)[^)#\s]*)(#([^)\s]+))?\)", text):
        found = page.parent / target if target else page
        # A browser of the repository shows the target of a symbolic link as text.
        assert found.exists() and not found.is_symlink(), target
        # `make docs` checks the anchors that it makes of docstrings.
        if anchor and not anchor.startswith("h2o_prefill."):
            headings = re.findall(r"^#+ (.+)$", prose(found), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
            assert anchor in [slug.replace(" ", "-") for slug in slugs], f"{target}#{anchor}"
    # Pages are read as they are: only `make docs` could include a part of another one.
    assert "--8<--" not in text
    pictures = {
        path.name for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.png")
    }
    assert set(re.findall(r"`(?:\S*/)?(\w+\.png)`", text)) <= pictures


@pytest.mark.model
def test_the_blocks_of_readme_run_one_after_the_other(smollm2, tmp_path, monkeypatch, capsys):
    source = Path(smollm2[0].config.name_or_path)
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    # Without instructions for bfloat16 PyTorch multiplies it for minutes.
    dtype = "bfloat16" if torch.ops.h2o_prefill.cpu_isa() in ("avx512_bf16", "amx") else "float32"
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    (tmp_path / "book.txt").write_text(BOOK.read_text()[:2_500])
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        block = block.replace("max_new_tokens=50", "max_new_tokens=8")
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # arguments that transformers drops
            exec(re.sub(r"^name = .*$", 'name = "."', block, flags=re.M), names)
    prompt = names["inputs"]["input_ids"]
    assert prompt.shape[1] > 500 and names["model"].dtype == getattr(torch, dtype)
    assert capsys.readouterr().out.strip(), "the answer is printed"
    assert names["sparse"].shape == names["dense"].shape
    (offline,) = re.findall(r"^# (model, tokenizer = .+)$", blocks[0], re.M)
    exec(offline, names)
    assert names["model"].config.max_position_embeddings == 8192


def test_one_page_says_from_how_many_tokens_on_prompts_are_sparse():
    rows = re.findall(r"^\| (.+?) \|(.+)\|$", (DOCS / "use.md").read_text(), flags=re.MULTILINE)
    name = f"(`{torch.ops.h2o_prefill.cpu_isa()}`)"
    rows = [row for device, row in rows if name in device or device.startswith("other CPUs")]
    lengths = [int(x.replace(",", "")) for x in re.findall(r"\d+,\d{3}", rows[0])]
    assert lengths == [
        h2o_prefill.preset_config(name).shortest_sparse_prompt(torch.empty(0, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
        for name in ("recommended", "h2o")
    ]
    others = words("".join(page.read_text() for page in PAGES if page.name != "use.md"))
    assert not re.search(r"(from|below|at) about [\d,]+ (prompt )?tokens", others)
