"""The figures of memory sets and of errors by layer."""

import math

import torch

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import plots

LENGTH = 72  # four chunks of 16 tokens and one of 8
CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
PROMPT = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(5))


def _shown(axes):
    return torch.from_numpy(axes.images[0].get_array().filled(math.nan))


def test_the_figures_show_the_arrays(tiny, tmp_path):
    folder = tmp_path / "new" / "folder"
    model = tiny.make_uneven_model()
    measures = plots.visualize_attention_patterns(model, PROMPT[0], CONFIG, folder, "svg")
    for name in ("memory", "errors"):
        assert (folder / f"{name}.svg").read_bytes().startswith(b"<?xml")
    figure = plots.plot_memory_sets(measures, tmp_path / "memory.png", "tiny")
    panel, bar = figure.axes
    assert figure.get_suptitle().startswith(f"{CONFIG.to_string()}, S = 16: ")
    # Of two KV heads and of one: three shares are possible, each with a colour.
    assert panel.images[0].get_cmap().N == 3 and bar.get_yticks().tolist() == [0, 0.5, 1]
    torch.testing.assert_close(_shown(panel), measures.head_share(4))
    figure = plots.plot_errors(measures, tmp_path / "errors.png", "tiny")
    error, mass, *_ = figure.axes
    assert ", S = 16: " in figure.get_suptitle()
    # The second layer has half the heads.
    absent = [[False] * 4, [False, False, True, True]]
    assert error.images[0].get_array().mask.tolist() == absent
    for axes, values in ((error, measures.l1_error), (mass, measures.mass_recall)):
        torch.testing.assert_close(_shown(axes), 100 * values, equal_nan=True)
