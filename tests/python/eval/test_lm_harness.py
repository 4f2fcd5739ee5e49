"""lm_eval with enabled models: prompts are prefilled sparsely, and scored as by hand."""

import json
import math

import pytest
import torch

from h2o_prefill import enable

pytest.importorskip("lm_eval")
SETTINGS = "h2o,chunk_size=16,local_window=4,heavy_budget=4"


@pytest.fixture
def evaluate(tiny, tmp_path):
    """Run a task of two questions about a text."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [{"text": (tiny.SENTENCE * 4).rstrip(), "word": word} for word in ("Sphinx", "vow")]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "words.yaml").write_text(
        f"""
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/data.json}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
doc_to_target: " {{{{word}}}}"
metric_list: [{{metric: perplexity}}]
"""
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(model, **options):
        found = simple_evaluate(
            model, tasks=["words"], task_manager=manager, bootstrap_iters=0, **options
        )
        return found["results"]["words"]["perplexity,none"], found["config"]

    return run, rows


def by_hand(model, tokenizer, rows):
    total = 0.0
    for row in rows:
        pair = row["text"], " " + row["word"]
        text, word = (tokenizer(x, return_tensors="pt").input_ids for x in pair)
        with torch.no_grad():
            logits = model(torch.cat([text, word], dim=1)[:, :-1]).logits
        total += float(logits[0, text.shape[1] - 1 :].log_softmax(-1).gather(1, word.T).sum())
    return math.exp(-total / len(rows))


def test_the_model_by_its_name(tiny, tmp_path, evaluate):
    import h2o_prefill.eval.lm_harness  # noqa: F401

    run, rows = evaluate
    folder = tiny.save_model(tmp_path / "model")
    arguments = f"pretrained={folder},settings={SETTINGS},recall=0"
    sparse, config = run("h2o_prefill", model_args=arguments, batch_size=1)
    dense, _ = run("h2o_prefill", model_args=f"pretrained={folder},settings=exact", batch_size=1)
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
    assert dense == pytest.approx(by_hand(model, tokenizer, rows), rel=1e-3)
    with enable(model, SETTINGS):
        assert sparse == pytest.approx(by_hand(model, tokenizer, rows), rel=1e-3)
    assert sparse != pytest.approx(dense, rel=1e-3)
    assert config["h2o_prefill"].startswith(SETTINGS)
