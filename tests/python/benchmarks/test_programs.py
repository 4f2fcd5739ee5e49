"""Every benchmark runs in its quick mode, and leaves JSON that says what was run where."""

import math
from functools import partial

import pytest
import torch

import h2o_prefill
from h2o_prefill import PrefillConfig, ops
from h2o_prefill.eval import count_attention_flops

KERNEL = ["milliseconds", "gflops", "percent", "speedup"]
# What every row of a benchmark has, and that is a time, a rate or a size above 0.
FIELDS = {
    "operators cpu_peak": ["rate", "best_rate"],
    "operators intra_chunk": KERNEL,
    "operators memory": KERNEL,
    "operators colsum": ["milliseconds", "milliseconds_without"],
    "operators select": ["milliseconds", "pytorch_milliseconds", "speedup"],
    "operators gather": ["gigabytes", "copy_gigabytes", "percent"],
    "operators scores": ["microseconds", "pytorch_microseconds", "speedup"],
    "operators dense": ["milliseconds", "sdpa_milliseconds", "speedup", "context"],
    "operators linear_layer": ["milliseconds", "gflops", "gigabytes", "speedup"],
    "operators windows": ["milliseconds", "gflops", "dense_percent", "speedup_over_sdpa"],
    "linear linear_decode": ["microseconds", "pytorch_microseconds", "speedup"],
    "linear linear": ["milliseconds", "gflops", "percent", "both_milliseconds"],
    "layer recall": ["keys_a_block"],
    "layer crossover": ["dense_milliseconds", "sparse_speedup", "speedup"],
    "layer prefill": ["dense_milliseconds", "sparse_milliseconds", "speedup", "flop_ratio"],
    "pages": ["milliseconds", "speedup"],
}
# These take long; some have a shorter run below.
SLOW = (
    *("operators colsum", "operators dense", "operators scores", "operators windows"),
    *("operators cpu_peak", "operators gather", "operators memory", "operators linear_layer"),
    *("linear linear", "linear linear_decode", "layer prefill", "layer crossover", "layer recall"),
)
slow = partial(pytest.param, marks=pytest.mark.slow)
ON_GPU = ("operators intra_chunk", "operators memory", "operators colsum")


def _check_report(report, fields):
    assert report["quick"] is True
    assert report["environment"]["cpu"] and report["environment"]["torch"]
    assert report["results"]
    for row in report["results"]:
        for field in fields:
            assert math.isfinite(row[field]) and row[field] > 0, (field, row)


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in FIELDS])
def test_operators(run, name):
    done, report = run(name)
    _check_report(report, FIELDS[name])
    assert report["title"] in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*ON_GPU, "layer prefill", "linear linear"])
def test_operators_on_a_gpu(run, name):
    _, report = run(name, "--device", "cuda")
    _check_report(report, [field for field in FIELDS[name] if field != "percent"])
    assert report["environment"]["gpu"]
    for row in report["results"]:
        assert row["device"] == "cuda" and row["dtype"] == "bfloat16"
        backends = row.get("sdpa_backends_milliseconds", {})
        assert name in ("operators colsum", "linear linear") or row["sdpa_backend"] in backends


def test_options_choose_rows(run):
    options = ("--shape", "smollm2", "--dtype", "float16", "--threads", "1,2", "--lengths", "5,130")
    _, report = run("layer prefill", *options)
    rows = report["results"]
    assert [(r["dtype"], r["threads"], r["length"]) for r in rows] == [
        ("float16", threads, length) for threads in (1, 2) for length in (5, 130)
    ]
    # One chunk is dense attention; 64 + 64 + 2 rows, the latter two beside a memory set of 16.
    assert rows[0]["flop_ratio"] == 1
    pairs = 2 * 64 * 65 / 2 + 2 * 3 / 2 + 66 * 16
    assert rows[1]["flop_ratio"] == pytest.approx(130 * 131 / 2 / pairs)


@pytest.mark.parametrize(
    ("name", "fields", "variants"),
    [
        ("model", "seconds speedup_over_chunked", "dense dense_chunked exact sparse no_attention"),
        ("decode", "milliseconds tokens_per_second", "stock enabled"),
        slow("session", "seconds file_mb", "each prefixes session reopened"),
        slow(
            "package",
            "seconds tokens_per_second",
            "package compiled eager dense decode_package decode_eager decode_stock",
        ),
    ],
)
def test_models(run, model_folder, name, fields, variants):
    _, report = run(f"models {name}", "--model", model_folder, "--dtype", "float32")
    _check_report(report, [*fields.split(), "speedup"])
    assert [row["variant"] for row in report["results"]] == variants.split()


EXACT, SMALL = "h2o,local_window=256,heavy_budget=256", "h2o,local_window=8,heavy_budget=8"
WIDENED = f"{SMALL},error_rows=4,error_threshold=0.0001,max_widen=4"
CAUSAL = (SMALL, WIDENED, "snapkv=16", "quoka=16")
SEES_THE_FUTURE = ("snapkv-own=72", "quoka-own=16", "xattention=0.5")


@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("selections", ("--variant", SMALL, "--variant", "snapkv=16"), [SMALL, "snapkv=16"]),
        ("variations", ("--forms", "same,capitals", "--variant", SMALL), [SMALL] * 2),
        ("answers", ("--variant", EXACT, "--variant", SMALL, "--question", ""), [EXACT, SMALL] * 3),
    ],
)
def test_losses_and_answers(run, model_folder, tmp_path, name, options, named):
    text = tmp_path / "text.txt"
    text.write_text("A quick brown fox did jump over it. " * 50)
    if name != "selections":
        options = (*options, "--text-file", text)
    if name == "answers":
        options = (*options, "--prompts", 3, "--new-tokens", 6)
    _, report = run(name, "--model", model_folder, *options)
    rows = report["results"]
    assert [row["variant"] for row in rows] == named
    for row in rows:
        if name == "selections":
            assert row["leak"] == 0 and min(row[x] for x in ("products", "kl", "top1_percent")) > 0
        elif name == "variations":
            # All of the passage comes after the first chunk, which is exact.
            assert 0 < row["changed_tokens"] <= 64 and row["changed_kl"] > row["kl"] > 0
        else:
            assert row["equal"] == (row["answers"]["dense"] == row["answers"][row["variant"]])
            # The most likely token of the dense run is no less likely than another one.
            assert row["equal"] or (0 <= row["parts_at"] < 6 and row["gap"] > 0)
            assert row["equal"] or row["variant"] == SMALL


@torch.no_grad()
def test_what_rules_of_selection_see_and_multiply(model):
    from common.benchmark import make_plan
    from selections import leak, run_of

    plan = make_plan("selections", quick=True)
    ids = torch.randint(1, 257, (1, 512), generator=torch.Generator().manual_seed(7))
    recalling = f"{SMALL},chunk_size=64,recall=2,dense_tail=8"
    logits, products = {}, {}
    for text in ("dense", recalling, *CAUSAL, *SEES_THE_FUTURE):
        run = run_of(text, plan, model, None)
        found, products[text] = run(ids)
        logits[text] = found.slice(0, 512)
        if text != "dense":
            assert (logits[text] - logits["dense"]).abs().max() > 0.01
            change = leak(run, ids, 64)
            assert change > 0.001 if text in SEES_THE_FUTURE else change == 0
    counted = count_attention_flops(ids, PrefillConfig.parse(recalling))
    assert products[recalling] == pytest.approx(products["dense"] / counted.ratio)
    # Widened sets and the rows that measure errors are counted.
    assert products[SMALL] < products[WIDENED]


def test_a_varied_window_is_passage_other_text_and_changed_passage(tiny):
    from common.variations import VARIATIONS, build_window

    tokenizer, text = tiny.make_tokenizer(), "The looking path, " * 3000
    for name, kind in VARIATIONS.items():
        window, changed = build_window(name, tokenizer, text, 2048)
        said = str(tokenizer.decode(window))  # a token is a byte
        assert len(window) == 2048 and 256 < 2048 - changed <= 512
        assert said[changed:].startswith("\n\n")
        assert (said[changed:].strip() in said[:512]) == (name == "same")
        assert kind.among_its_like or said[512:changed] in text
    with pytest.raises(ValueError, match=r"longer for windows of 2048 tokens: 1000 characters"):
        build_window("capitals", tokenizer, text[:1000], 2048)


def test_the_variants_of_a_model_are_what_they_say(model, config):
    from common.variants import decode_variants, prefill_variants

    assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    ids = torch.randint(257, (1, 150), generator=torch.Generator().manual_seed(0))
    logits = {name: run() for name, run in prefill_variants(model, ids, config).items()}
    with torch.no_grad():
        dense = model(ids).logits[0, -1]
        with h2o_prefill.enable(model, config):
            assert_close(logits["sparse"], model(ids).logits[0, -1])
    for name in ("dense", "dense_chunked", "exact"):
        assert_close(logits[name], dense)
    for name in ("sparse", "no_attention"):
        assert (logits[name] - dense).abs().max() > 1e-2
    # Decoding leaves its cache as it was.
    decodes = decode_variants(model, ids, config, steps=6)
    expected = model.generate(ids, max_new_tokens=7, do_sample=False)[0, 151:]
    assert torch.equal(decodes["stock"](), expected)
    for decode in decodes.values():
        assert torch.equal(decode(), decode())


def test_allocations(run):
    _, report = run("layer allocations", "--shape", "smollm2", "--dtype", "bfloat16")
    for row in (row for row in report["results"] if "length" in row):
        # A bf16 key and value a head, beside an fp32 score a position and 16 positions.
        assert row["kv_megabytes"] * 1e6 == 2 * 3 * row["length"] * 64 * 2
        assert row["state_megabytes"] * 1e6 == pytest.approx(3 * 4 * (row["length"] + 16))
        assert row["workspace_megabytes"] > 0


def test_baselines_give_what_the_operators_give():
    import linear
    from common.attention import random_memory
    from common.benchmark import SHAPES, Case
    from operators import select_with_pytorch

    q, k, v = Case(SHAPES["smollm2"], torch.float32).qkv(128)
    expected, _, _ = ops.chunkwise_linear_attention(q, k, v)
    found = [linear.masked_square(q, k, v), linear.cumulative_sums(q, k, v)]
    if fla := linear.find_fla():
        found.append(linear.flash_linear_attention(fla, q, k, v)())
    for out in found:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    state = torch.randn(1, 3, 64, 64)
    q, k, v = (x[:, :, :5] for x in (q, k, v))
    steps = ops.chunkwise_linear_attention(q, k, v, None, state)[:2]
    torch.testing.assert_close(linear.decode(q, k, v, state), tuple(steps), rtol=1e-4, atol=1e-3)
    scores = torch.rand(1, 3, 400, generator=torch.Generator().manual_seed(1))
    where = (scores, random_memory(3, 64, 300), 300, 400, 24, 40)
    assert torch.equal(select_with_pytorch(*where), ops.select_memory(*where, 0))


def test_simulated_processes(run, model_folder):
    from scale import Network, Parts, layers_schedule

    _, report = run("scale simulate", "--model", model_folder, "--dtype", "float32")
    rows = report["results"]
    assert [row["ranks"] for row in rows] == [1, 2]  # of two layers
    assert all(0 < row["layers_efficiency_percent"] <= 100.001 for row in rows)

    parts = Parts(4, seconds=6.0, contention=1.0, hidden_bytes=1000)
    near, far = Network(0.0, 1e30), Network(10.0, 100.0)
    # C chunks through P stages: C + P - 1 steps of the layers of one.
    assert layers_schedule(parts, near, 8, 4, [1.0] * 4) == pytest.approx((8 + 4 - 1) * 6.0)
    # Two layers, a message, eight chunks in the stage after, and its message.
    slow = layers_schedule(parts, far, 8, 2, [1.0, 1.0])
    assert slow == pytest.approx(12.0 + 20.0 + 8 * 12.0 + 20.0)
    assert layers_schedule(parts, near, 8, 2, [1.0, 2.0]) == pytest.approx(12.0 + 8 * 24.0)


def test_the_reports_of_the_repository_are_read_and_drawn(tmp_path, monkeypatch):
    import plot
    from common.benchmark import RESULTS
    from common.losses import read_losses
    from common.report import read_report
    from typer.testing import CliRunner

    facts = read_report(RESULTS / "peers.json")["config"]
    assert read_losses([RESULTS / "peers_losses.json"], facts)
    figures = {}
    save = plot.save_figure
    monkeypatch.setattr(
        plot, "save_figure", lambda f, path, *texts: figures.update({path: save(f, path, *texts)})
    )
    done = CliRunner().invoke(plot.app, ["--output", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    names = [
        "throughput_comparison",
        "crossover",
        "memory_profile",
        "linear",
        "peers",
        "peers_memory",
        "scale",
    ]
    assert set(figures) == set(tmp_path.iterdir()) == {tmp_path / f"{name}.png" for name in names}
    assert CliRunner().invoke(plot.app, ["--results", str(tmp_path)]).exit_code == 2
    assert all(axes.has_data() for figure in figures.values() for axes in figure.axes)
