"""The pages of docs/ say what the package says."""

import re
from pathlib import Path

import pytest

import h2o_prefill
from h2o_prefill import PrefillConfig
from h2o_prefill.hf import forward, masks, rules

DOCS = Path(__file__).parents[3] / "docs"

# Reasons that are made in functions, and those of other modules than the decision table's.
OTHERS = {
    rules.OWN_MASKS,
    rules.TRACED,
    rules.NOT_ENABLED,
    rules.STATIC,
    rules.MASKED,
    rules.CONTINUES,
    masks.HOLES,
    masks.NOT_CAUSAL,
    forward.NO_IDS,
    forward.CHANGED,
}


def reasons() -> list[str]:
    table = {rule.reason for rule in rules.RULES if isinstance(rule.reason, str)}
    return sorted((table | OTHERS) - {""})


def words(text: str) -> str:
    return re.sub(r"[`*\s]+", " ", text)


@pytest.mark.parametrize("reason", reasons())
def test_the_faq_has_every_reason_for_dense_attention(reason: str) -> None:
    # The text after a semicolon is advice already.
    assert words(reason.split(";")[0]) in words((DOCS / "faq.md").read_text())


@pytest.mark.parametrize(
    "fields", [{"chunk_size": 64, "local_window": 64}, {"local_window": 0, "heavy_budget": 0}]
)
def test_the_faq_has_the_advice_on_settings(fields: dict[str, int]) -> None:
    with pytest.warns(UserWarning, match="memory set") as caught:
        PrefillConfig(**fields)
    faq = words((DOCS / "faq.md").read_text())
    sentence = words(str(caught[0].message))
    assert any(
        part in faq
        for part in ("is not smaller than chunk_size", "(K + L + H = 0)")
        if part in sentence
    )


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    documented = set(re.findall(r"^::: [\w.]*?(\w+)$", page, flags=re.MULTILINE))
    linked = {"PRESETS", "distributed", "reference"}
    assert linked <= set(re.findall(r"`(\w+)`", page))
    assert documented >= set(h2o_prefill.__all__) - linked


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)", prose):
            assert (DOCS / target).exists(), f"{page.name}: {target}"
