"""Session files: what C++ writes Python reads, and the other way round."""

import pytest
import torch
from op_testing import Shape, make_qkv

from h2o_prefill.session import Session

classes = torch.classes.h2o_prefill
SETTINGS = "recommended,min_prefill=none,chunk_size=16,local_window=3,heavy_budget=4,recall=0"
MODEL = "config=1 weights=2"


def new_context():
    return classes.PrefillContext(2, 90, classes.PrefillConfig.parse(SETTINGS), True)


def run(context, qkv, begin, end):
    context.begin(torch.arange(begin, end)[None], None)
    rows = [x[:, :, begin:end] for x in qkv]
    return torch.stack([context.attend(layer, *rows) for layer in range(2)])


@pytest.fixture
def qkv():
    return make_qkv(Shape(1, 4, 2, 90, 8, 16), layout="contiguous")


@pytest.fixture
def saved(tmp_path, qkv):
    """A context, and the file that it was saved in."""
    context = new_context()
    run(context, qkv, 0, 70)
    context.save(str(tmp_path / "text.session"), MODEL)
    return context, tmp_path / "text.session"


def test_python_reads_what_cpp_writes_and_cpp_what_python_writes(saved, qkv):
    context, path = saved
    session = Session.load(path)
    assert session.settings == context.config().to_fields()
    assert session.fingerprint == MODEL
    assert torch.equal(session.token_ids, torch.arange(70)[None])
    for number, layer in enumerate(session.layers):
        assert torch.equal(layer.key, context.cache().key(number))
        assert torch.equal(layer.scores, context.tracker().scores(number))
        assert layer.checkpoint_before(60) == 48
        layer.clone().append(*(torch.zeros(1, 2, 99, dim) for dim in (8, 16)))  # any capacity
    session.save(path.with_suffix(".python"))
    other = new_context()
    other.load(str(path.with_suffix(".python")), MODEL)
    for state in (context, other):
        state.truncate(48)
    assert torch.equal(run(other, qkv, 48, 90), run(context, qkv, 48, 90))
    again = Session.load(path)
    assert torch.equal(again.layers[0].key, session.layers[0].key), "a memory map is private"
    assert sorted(x.name for x in path.parent.iterdir()) == ["text.python", "text.session"]


def test_sessions_without_ids(tmp_path, qkv):
    context = new_context()
    context.begin_without_ids(70, None)
    for layer in range(2):
        context.attend(layer, *(x[:, :, :70] for x in qkv))
    context.save(str(tmp_path / "x"), MODEL)
    assert Session.load(tmp_path / "x").token_ids is None
    other = new_context()
    other.load(str(tmp_path / "x"), MODEL)
    assert other.token_ids() is None


def test_files_that_are_no_session_are_refused(saved, tmp_path):
    _, path = saved
    context = new_context()
    whole = path.read_bytes()
    key = saved[0].cache().key(1).contiguous().numpy().tobytes()
    middle = whole.index(key) + len(key) // 2
    foreign = tmp_path / "foreign"
    torch.save({"weights": torch.zeros(3)}, foreign)
    older = tmp_path / "older"
    torch.save(("h2o_prefill.session", 2), older)
    cut, flipped, text = tmp_path / "cut", tmp_path / "flipped", tmp_path / "text"
    cut.write_bytes(whole[:-9])
    flipped.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    text.write_text("a text")
    for file, reason in [
        (foreign, "it is no session file"),
        (older, "its version must be 3, got 2"),
        (cut, "it is no session file, or is damaged"),
        (flipped, "it is no session file, or is damaged"),
        (text, "it is no session file, or is damaged"),
    ]:
        line = f"session '{file}' cannot be read: {reason}"
        with pytest.raises(ValueError, match=line):
            context.load(str(file), MODEL)
        with pytest.raises(ValueError, match=line):
            Session.load(file)
    with pytest.raises(FileNotFoundError):
        Session.load(tmp_path / "missing")
    with pytest.raises(RuntimeError, match=r"\[Errno 2\] cannot read"):
        context.load(str(tmp_path / "missing"), MODEL)
    with pytest.raises(RuntimeError, match=r"\[Errno 2\] cannot write"):
        saved[0].save(str(tmp_path / "missing" / "x"), MODEL)


def test_wrong_numbers_in_a_session_are_refused(saved, tmp_path):
    _, path = saved
    values = list(torch.load(path))
    memory = next(i for i, x in enumerate(values) if torch.is_tensor(x) and x.dtype == torch.int32)
    for change, reason in [
        ({2: "h2o,heavy_budget=9"}, "session must have the settings"),
        ({3: "weights=3"}, "session must be of this model: config must be 1, got none"),
        ({2: "nonsense=1"}, "nonsense"),
        ({4: torch.zeros(1, 3).long()}, "token ids must be int64"),
        ({5: torch.tensor([9, 9, 9])}, "tensors must hold all layers"),
        ({memory: values[memory] + 70}, "memory must be -1 or in"),
    ]:
        changed = [change.get(i, x) for i, x in enumerate(values)]
        torch.save(tuple(changed), tmp_path / "changed")
        with pytest.raises(ValueError, match=reason):
            new_context().load(str(tmp_path / "changed"), MODEL)
    for layers, most, reason in [(3, 90, "have 3 layers"), (2, 69, "at most 69 tokens")]:
        other = classes.PrefillContext(layers, most, classes.PrefillConfig.parse(SETTINGS), True)
        with pytest.raises(ValueError, match=reason):
            other.load(str(path), MODEL)
