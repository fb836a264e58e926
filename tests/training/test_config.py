import msgspec
import pytest

from ls_edge.core.errors import ConfigError, UsageError
from ls_edge.training.config import TrainConfig, read_config


def write(tmp_path, text):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write(tmp_path, "epochs: 3\nbatch_size: 16\noptim: {lr: 0.5, warmup: 0.2}\ndata: {source: digits}\n")
    config, named = read_config(path, {"lr": 0.25, "epochs": None, "seed": 4})
    assert (config.epochs, config.batch_size, config.seed) == (3, 16, 4)
    assert (config.optim.lr, config.optim.warmup, config.optim.clip) == (0.25, 0.2, TrainConfig().optim.clip)
    assert config.data.source == "digits"
    assert named == {"epochs", "batch_size", "seed", "optim.lr", "optim.warmup", "data.source"}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("epochs: 3\noptim:\n  lrr: 1\n", "3:3", "did you mean 'lr'"),
        ("epochs: -1\n", "1:9", "epochs is -1; it has to be a whole number from 0"),
        ("optim:\n  lr: 0\n", "2:7", "lr is 0; it has to be a number above 0"),
        ("data: {validation: 1.0}\n", "1:20", "validation is 1.0"),
        ("method: [a]\n", "1:9", "method"),
        ("bands: [[0], [2]]\n", "1:8", "expected block 1, found block 2"),
        ("epochs: 1\nbands: 0/1-x\n", "2:8", "are not lists of blocks"),
        ("epochs: 1\nepochs: 2\n", "2:1", "occurs twice"),
    ],
)
def test_errors_have_a_place(tmp_path, text, place, words):
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, text), {})
    assert f"train.yaml:{place}: " in str(caught.value)
    assert words in str(caught.value)


def test_any_setting_can_be_changed(tmp_path):
    path = write(tmp_path, "optim: {lr: 0.5}\nmodel: {args: {depth: 4}}\n")
    changes = ["optim.lr=1e-3", "model.args.embed_dim=64", "checkpointing=true", "stored=fp16"]
    config, named = read_config(path, {"lr": 0.25}, [*changes, "optim.clip=", "optim.betas=[0.8, 0.9]"])
    assert (config.optim.lr, config.optim.clip, config.optim.betas) == (0.001, None, (0.8, 0.9))
    assert (config.model.args, config.checkpointing, config.stored) == ({"depth": 4, "embed_dim": 64}, True, "fp16")
    assert named == {"optim.lr", "optim.clip", "optim.betas", "model.args", "checkpointing", "stored"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optim.clip", "--set optim.clip: write KEY=VALUE"),
        ("optim..clip=1", "--set optim..clip=1: write KEY=VALUE"),
        ("=1", "--set =1: write KEY=VALUE"),
        ("model.init=''", "init is ''; it has to be text that is not empty"),
        ("teacher.model=''", "model is ''; it has to be text that is not empty"),
        ("data.class_order=''", "class_order is ''; it has to be text that is not empty"),
        ("optim.clipp=1", "did you mean 'clip'"),
        ("epochs.x=1", "epochs has no keys; write epochs=VALUE"),
        ("epochs=many", "epochs is 'many'"),
        ("threads=100000", "threads is 100000; it has to be a whole number from 1 to 1024"),
        ("validation_orders=1000000", "validation_orders is 1000000; it has to be a whole number from 1 to 100000"),
        ("data.workers=100000", "workers is 100000; it has to be a whole number from 0 to 1024"),
        ("model.args={a: [}", "not YAML: "),
    ],
)
def test_changes_are_checked(tmp_path, change, words):
    with pytest.raises(UsageError, match=words):
        read_config(write(tmp_path, "epochs: 3\n"), {}, [change])


@pytest.mark.parametrize(("value", "read"), [("off", False), ("on", True), ("false", False), ("auto", "auto")])
def test_compile_is_read_as_the_advice_writes_it(tmp_path, value, read):
    """A YAML file and --set have ``off`` as a bool, and a run keeps what was set."""
    config, _ = read_config(write(tmp_path, f"compile: {value}\n"), {})
    assert config.compile == read
    assert read_config(None, {}, [f"compile={value}"])[0].compile == read
    assert msgspec.convert(msgspec.to_builtins(config), TrainConfig).compile == read


@pytest.mark.parametrize("text", ["bands: 0/1-2\n", "bands: [[0], [1, 2]]\n"])
def test_bands_may_be_lists_or_text(tmp_path, text):
    assert read_config(write(tmp_path, text), {})[0].bands == [[0], [1, 2]]
    assert read_config(write(tmp_path, text), {"bands": "0-1/2"})[0].bands == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"bands": "1/0"}, "bands 1/0: expected block 0, found block 1"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"seed": 2**40}, "seed is 1099511627776"),
    ],
)
def test_flags_are_checked(flags, words):
    with pytest.raises(UsageError, match=words):
        read_config(None, flags)
