"""Tables to questions: which rows are chosen, what is refused by name, the prompt's text, and where a folder is."""

import io
import os
import random
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from support import hub
from geoqa import Question, format_question, load_geoqa
from support.errors import UserError
from support.hub import hub_folder

ROOT = Path(__file__).parents[1]


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of a few bytes that says to be of any size: it is refused by its header."""
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


PNG = encode(Image.new("RGBA", (12, 8), (0, 0, 0, 0)))
NOISE = encode(Image.effect_noise((40, 40), 50))


def make_row(id, split="test", **changes):
    row = {"id": id, "image": {"bytes": PNG, "path": None}, "subject": f"question {id}",
           "choices": ["1", "2", "3", "4"], "label": id % 4 if isinstance(id, int) else 0, "answer": "worked",
           "original_split": split}
    return row | changes


def write(path, rows, drop=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table.drop_columns(list(drop)), path)


def ids(questions):
    return [question.id for question in questions]


def table_of_759(broken=()):
    """759 test rows among train and dev rows, in a fixed mixed order; `broken` ids have half a figure."""
    splits = ["test"] * 759 + ["train"] * 200 + ["dev"] * 90
    random.Random(0).shuffle(splits)
    half = {"bytes": NOISE[:len(NOISE) // 2], "path": None}
    return [make_row(i, split, **({"image": half} if i in broken else {})) for i, split in enumerate(splits)]


def write_759(folder, broken=()):
    rows = table_of_759(broken)
    write(folder / "data" / "b.parquet", rows[500:])
    write(folder / "data" / "a.parquet", rows[:500])
    return folder


@pytest.fixture(scope="module")
def chosen():
    """The published test set, as its own library calls spell it, over all rows."""
    from datasets import Dataset

    rows = [{"id": row["id"], "original_split": row["original_split"]} for row in table_of_759()]
    test = Dataset.from_list(rows).filter(lambda row: row["original_split"] == "test").shuffle(seed=42)
    return test.select(range(len(test) - 100, len(test)))["id"][:]


@pytest.fixture(scope="module")
def folder_759(tmp_path_factory):
    return str(write_759(tmp_path_factory.mktemp("geoqa")))


@pytest.mark.parametrize("seed", [0, 42, 12345])
def test_the_100_are_the_published_ones_whatever_the_seed(folder_759, chosen, seed):
    questions = load_geoqa(folder_759, "test", seed=seed)
    assert ids(questions) == chosen and len(chosen) == 100
    assert questions.notes == [] and questions.revision == "local"


@pytest.mark.parametrize("position", [0, 50, 99])
def test_a_bad_figure_leaves_the_other_99(tmp_path, chosen, position):
    broken = chosen[position]
    questions = load_geoqa(str(write_759(tmp_path, {broken})), "test", seed=7)
    assert ids(questions) == [id for id in chosen if id != broken]
    (note,) = questions.notes
    file = "data/a.parquet" if broken < 500 else "data/b.parquet"
    assert note.startswith(f"left out: {file}, row id {broken}, column image: OSError") and "\n" not in note


def test_a_bad_figure_elsewhere_changes_nothing(tmp_path, chosen):
    outside = [row["id"] for row in table_of_759() if row["original_split"] == "test" and row["id"] not in chosen]
    questions = load_geoqa(str(write_759(tmp_path, {outside[0], outside[300], outside[-1]})), "test")
    assert ids(questions) == chosen and questions.notes == []


def test_more_than_one_percent_of_bad_figures(tmp_path, chosen):
    broken = set(chosen[10:12])
    with pytest.raises(UserError, match="^2 of 100 figures cannot be used, more than 1 %: data/.*row id .*; data/"):
        load_geoqa(str(write_759(tmp_path, broken)), "test")


def test_sizes_and_splits(folder_759, chosen):
    rows = table_of_759()
    whole = ids(load_geoqa(folder_759, "test", test_size=0))
    assert len(whole) == 759 and whole[-100:] == chosen
    assert ids(load_geoqa(folder_759, "test", max_samples=3)) == chosen[:3]
    assert ids(load_geoqa(folder_759, "test", test_size=5)) == chosen[-5:]
    dev = [row["id"] for row in rows if row["original_split"] == "dev"]
    assert ids(load_geoqa(folder_759, "dev")) == dev
    assert ids(load_geoqa(folder_759, "dev", max_samples=4)) == dev[:4]
    few = load_geoqa(folder_759, "test", test_size=1000)
    assert ids(few) == whole
    assert few.notes == ["the test split has 759 rows, fewer than the 1000 of test_size: all are used"]
    few = load_geoqa(folder_759, "dev", max_samples=91)
    assert ids(few) == dev
    assert few.notes == ["the dev split has 90 rows, fewer than the 91 of max_samples: all are used"]


@pytest.mark.parametrize("seed", [42, 7])
def test_train_order_comes_from_the_seed(tmp_path, seed):
    from datasets import Dataset

    write(tmp_path / "train.parquet", [make_row(i) for i in range(3503)])
    order = Dataset.from_dict({"id": range(3503)}).shuffle(seed=seed)["id"][:]
    assert ids(load_geoqa(str(tmp_path), "train", seed=seed, max_samples=40)) == order[:40]
    questions = load_geoqa(str(tmp_path), "train", seed=seed)
    assert len(questions) == 3503 and ids(questions[-8:]) == order[-8:]


def test_a_question(tmp_path):
    write(tmp_path / "train.parquet", [make_row("x-1", label=2, subject="S", choices=["p", "q", "r", "s"])])
    questions = load_geoqa(str(tmp_path), "train")
    question = questions[0]
    assert (question.id, question.subject, question.choices) == ("x-1", "S", ("p", "q", "r", "s"))
    assert (question.label, question.answer) == ("C", "worked")
    assert (question.image.mode, question.image.size) == ("RGBA", (12, 8))
    assert questions[0].image is not question.image  # decoded at access, not kept
    assert questions[-1].id == "x-1" and len(questions[:1]) == 1
    with pytest.raises(IndexError):
        questions[1]


@pytest.mark.parametrize("drop, answer", [(["answer"], "gone"), ([], None)])
def test_answer_may_be_missing(tmp_path, drop, answer):
    write(tmp_path / "test.parquet", [make_row(1, answer=answer), make_row(2)], drop)
    assert {q.id: q.answer for q in load_geoqa(str(tmp_path), "test")}[1] == ""


def test_raw_bytes_column(tmp_path):
    write(tmp_path / "test.parquet", [make_row(1, image=PNG)])
    assert load_geoqa(str(tmp_path), "test")[0].image.size == (12, 8)


def test_prepared_layout(tmp_path):
    write(tmp_path / "train.parquet", [make_row(i) for i in range(5)], ["original_split"])
    write(tmp_path / "test.parquet", [make_row(i) for i in range(10, 13)], ["original_split"])
    test = load_geoqa(str(tmp_path), "test", test_size=3)
    assert sorted(ids(test)) == [10, 11, 12] and test.notes == []
    assert sorted(ids(load_geoqa(str(tmp_path), "train"))) == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match=r"neither data/\*.parquet nor dev.parquet"):
        load_geoqa(str(tmp_path), "dev")


def test_raw_layout_wins(tmp_path):
    write(tmp_path / "data" / "a.parquet", [make_row(1)])
    write(tmp_path / "test.parquet", [make_row(2)])
    questions = load_geoqa(str(tmp_path), "test", test_size=0)
    assert ids(questions) == [1]
    assert questions.notes == [f"{tmp_path} holds data/*.parquet, so test.parquet is not used"]


def test_a_folder_name_with_an_equals_sign_adds_no_column(tmp_path):
    write(tmp_path / "label=7" / "data" / "a.parquet", [make_row(1)])
    assert load_geoqa(str(tmp_path / "label=7"), "test")[0].label == "B"


@pytest.mark.parametrize("column, value, reason", [
    ("label", 4, "4 is not one of 0..3"),
    ("label", -1, "-1 is not one of 0..3"),
    ("label", None, "None is not one of 0..3"),
    ("label", "2", "'2' is not one of 0..3"),
    ("label", 2.0, "2.0 is not one of 0..3"),
    ("label", True, "True is not one of 0..3"),
    ("choices", ["1", "2", "3"], "is not a list of four non-empty strings"),
    ("choices", ["1", "2", "3", "4", "5"], "is not a list of four non-empty strings"),
    ("choices", ["1", "2", " \u3000", "4"], "is not a list of four non-empty strings"),
    ("choices", ["1", "2", None, "4"], "is not a list of four non-empty strings"),
    ("choices", [1, 2, 3, 4], "is not a list of four non-empty strings"),
    ("choices", "1234", "is not a list of four non-empty strings"),
    ("choices", None, "None is not a list of four non-empty strings"),
    ("subject", "", "'' is not a non-empty string"),
    ("subject", " \n", "is not a non-empty string"),
    ("subject", None, "None is not a non-empty string"),
    ("subject", 5, "5 is not a non-empty string"),
    ("id", None, "None is not a whole number or a string"),
    ("id", 1.5, "1.5 is not a whole number or a string"),
    ("image", "figure.png", "'figure.png' is not an encoded figure"),
    ("answer", 5, "5 is not a string"),
    ("original_split", None, "None is not one of train, test, dev"),
    ("original_split", "val", "'val' is not one of train, test, dev"),
])
def test_a_bad_value_is_named(tmp_path, column, value, reason):
    write(tmp_path / "data" / "x.parquet", [make_row(17) | {column: value}])
    with pytest.raises(UserError) as caught:
        load_geoqa(str(tmp_path), "test")
    id = value if column == "id" else 17
    assert str(caught.value).startswith(f"data/x.parquet, row id {id}, column {column}: ")
    assert str(caught.value).endswith(reason)


def test_a_bad_value_outside_the_selection_is_still_named(tmp_path):
    write(tmp_path / "test.parquet", [make_row(i, label=4 if i == 3 else 0) for i in range(50)])
    for size in range(1, 50, 12):
        with pytest.raises(UserError, match="test.parquet, row id 3, column label: 4 is not one of 0..3"):
            load_geoqa(str(tmp_path), "test", test_size=size)


@pytest.mark.parametrize("column", ["id", "image", "subject", "choices", "label", "original_split"])
def test_a_missing_column_is_named(tmp_path, column):
    write(tmp_path / "data" / "x.parquet", [make_row(1)], [column])
    with pytest.raises(UserError, match=f"^data/x.parquet, column {column}: expected once, found 0 times$"):
        load_geoqa(str(tmp_path), "test")


def test_text_that_is_not_utf8(tmp_path):
    write(tmp_path / "test.parquet", [make_row(1)])
    table = pq.read_table(tmp_path / "test.parquet")
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    pq.write_table(table.set_column(table.schema.get_field_index("subject"), "subject", bad), tmp_path / "test.parquet")
    with pytest.raises(UserError, match="test.parquet of .* is not a readable parquet file: ArrowInvalid"):
        load_geoqa(str(tmp_path), "test")


def test_a_column_name_that_is_not_utf8(tmp_path):
    write(tmp_path / "test.parquet", [make_row(1)])
    data = (tmp_path / "test.parquet").read_bytes()
    assert b"subject" in data
    (tmp_path / "test.parquet").write_bytes(data.replace(b"subject", b"subj\x80ct"))
    with pytest.raises(UserError, match="test.parquet"):
        load_geoqa(str(tmp_path), "test")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"id,image\n1,2\n" * 50, "half"])
def test_an_unreadable_file_is_named(tmp_path, content):
    write(tmp_path / "data" / "a.parquet", [make_row(1)])
    whole = (tmp_path / "data" / "a.parquet").read_bytes()
    (tmp_path / "data" / "b.parquet").write_bytes(whole[:len(whole) // 2] if content == "half" else content)
    with pytest.raises(UserError, match="^data/b.parquet of .* is not a readable parquet file: [^\n]+$"):
        load_geoqa(str(tmp_path), "test")


def test_no_rows_no_files_no_such_split(tmp_path):
    with pytest.raises(UserError, match=r"neither data/\*.parquet nor test.parquet in this folder"):
        load_geoqa(str(tmp_path), "test")
    write(tmp_path / "data" / "x.parquet", [make_row(1, "train")])
    with pytest.raises(UserError, match="the test split has no rows"):
        load_geoqa(str(tmp_path), "test")
    with pytest.raises(UserError, match="the val split has no rows"):
        load_geoqa(str(tmp_path), "val")


@pytest.mark.parametrize("cell, reason", [
    ({"bytes": None, "path": None}, "no bytes"),
    ({"bytes": b"", "path": None}, "no bytes"),
    ({"bytes": None, "path": "/etc/hostname"}, "no bytes"),  # a data set cannot make us read local files
    (None, "no bytes"),
    ({"bytes": b"no figure", "path": None}, "none of PNG"),
    ({"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "path": None}, "none of PNG"),
    ({"bytes": NOISE[:900], "path": None}, "OSError: image file is truncated"),
    ({"bytes": NOISE[:40], "path": None}, "none of PNG"),
    ({"bytes": encode(Image.effect_noise((40, 40), 50), "JPEG")[:600], "path": None}, "OSError"),
    ({"bytes": encode(Image.new("L", (201, 1))), "path": None}, "201 x 1 pixels, an aspect ratio above 200"),
    ({"bytes": encode(Image.new("L", (2, 402))), "path": None}, "2 x 402 pixels"),
    ({"bytes": bomb(10_000, 10_000), "path": None}, "DecompressionBombWarning"),
    ({"bytes": bomb(20_000, 20_000), "path": None}, "DecompressionBombError"),
])
def test_figures_that_cannot_be_used(tmp_path, cell, reason):
    write(tmp_path / "test.parquet", [make_row(i, image=cell if i == 7 else {"bytes": PNG, "path": None})
                                      for i in range(100)])
    questions = load_geoqa(str(tmp_path), "test")
    (note,) = questions.notes
    assert note.startswith(f"left out: test.parquet, row id 7, column image: {reason}") and "\n" not in note
    assert len(questions) == 99 and 7 not in ids(questions)


def test_figures_at_the_edge_are_used(tmp_path):
    frames = [Image.new("P", (9, 9), i) for i in (1, 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    gif = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    figures = [gif, encode(Image.new("L", (200, 1))), encode(Image.new("I;16", (3, 3)))]
    write(tmp_path / "dev.parquet", [make_row(i, image={"bytes": f, "path": None}) for i, f in enumerate(figures)])
    questions = load_geoqa(str(tmp_path), "dev")
    assert questions.notes == [] and [q.image.size for q in questions] == [(9, 9), (200, 1), (3, 3)]
    assert questions[0].image.convert("RGB").getpixel((0, 0)) == (255, 0, 0)  # the first of two frames


@pytest.mark.parametrize("split, size", [("train", 54), ("test", 15)])
def test_real_figures(geolaux, split, size):
    questions = load_geoqa(str(geolaux), split)
    assert len(questions) == len(set(ids(questions))) == size
    fewer = "the test split has 15 rows, fewer than the 100 of test_size: all are used"
    assert questions.notes == ([fewer] if split == "test" else [])
    for question in questions:
        text = format_question(question)
        assert question.image.mode == "RGBA" and min(question.image.size) > 50
        assert question.label in "ABCD" and question.answer and question.answer not in text
        assert all(f"\n{letter}. {choice.strip()}\n" in text for letter, choice in zip("ABCD", question.choices))


INSTRUCTION = ("请简要推理，最后把正确选项的字母写在\\boxed{}中，"
               "即以\\boxed{A}、\\boxed{B}、\\boxed{C}、\\boxed{D}之一结尾。")


def test_format_question():
    question = Question(1, None, " 求∠1 \n", (" 35°", "4\n0°", "√2", "D"), "A", answer=" 解：略\n")
    assert format_question(question) == f"求∠1\nA. 35°\nB. 4 0°\nC. √2\nD. D\n{INSTRUCTION}"
    assert format_question(question, with_solution=True) == (
        f"求∠1\nA. 35°\nB. 4 0°\nC. √2\nD. D\n参考解答：解：略\n{INSTRUCTION}")


# Folders and hub ids

def failure(name):
    from huggingface_hub import errors

    response = SimpleNamespace(headers={}, request=None)
    return {
        "not there": lambda: errors.RepositoryNotFoundError("404.\n\nNot Found", response=response),
        "gated": lambda: errors.GatedRepoError("403", response=response),
        "revision": lambda: errors.RevisionNotFoundError("404", response=response),
        "malformed": lambda: errors.HFValidationError("Repo id must ..."),
        "nothing cached": lambda: errors.LocalEntryNotFoundError("Got: ConnectError: no route\nAn error happened"),
        "server": lambda: errors.HfHubHTTPError("500 Server Error\nfor url", response=response),
        "http library": lambda: errors.HTTPError("missing protocol"),
        "disk": lambda: OSError(28, "No space left on device"),
        "silent": lambda: RuntimeError(),
    }[name]()


@pytest.mark.parametrize("name, parts", [
    ("not there", ["the dataset 'own/er' is not on the hub, or needs a login"]),
    ("gated", ["is not on the hub, or needs a login (HF_TOKEN)"]),
    ("revision", ["the dataset 'own/er' has no revision 'v9'"]),
    ("malformed", ["'own/er' is neither a folder nor a hub id"]),
    ("nothing cached", ["could not be fetched", "ConnectError: no route", "HF_HOME", "HF_ENDPOINT"]),
    ("server", ["could not be fetched (HfHubHTTPError: 500 Server Error)", "HF_ENDPOINT"]),
    ("http library", ["could not be fetched (HTTPError: missing protocol)", "HF_ENDPOINT"]),
    ("disk", ["No space left on device", "HF_HOME"]),
    ("silent", ["could not be fetched (RuntimeError: )"]),
])
def test_hub_failures_are_one_line(monkeypatch, name, parts):
    def fail(*args, **kwargs):
        raise failure(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError) as caught:
        hub_folder("own/er@v9", "dataset")
    message = str(caught.value)
    assert all(part in message for part in parts) and "\n" not in message
    assert "a local folder works in its place" in message


def test_hub_success_gives_the_commit(tmp_path, monkeypatch):
    write(tmp_path / "abc123" / "data" / "a.parquet", [make_row(1)])
    calls = []

    def fetch(name, **options):
        calls.append((name, options))
        return str(tmp_path / "abc123")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load_geoqa("own/er", "test").revision == "abc123"
    assert hub_folder("own/er@refs/pr/1", "model") == (tmp_path / "abc123", "abc123")
    assert calls == [
        ("own/er", {"repo_type": "dataset", "revision": None, "allow_patterns": ["data/*.parquet", "*.parquet"]}),
        ("own/er", {"repo_type": "model", "revision": "refs/pr/1", "allow_patterns": None}),
    ]


def test_hub_local_folders(tmp_path, monkeypatch):
    assert hub_folder(str(tmp_path), "model") == (tmp_path, "local")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_folder("~", "model") == (tmp_path, "local")
    with pytest.raises(UserError, match="is a local folder, which has no revision: leave @main out"):
        hub_folder(f"{tmp_path}@main", "model")
    with pytest.raises(UserError, match="is a file"):
        hub_folder(hub.__file__, "model")


def test_hub_names_with_a_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "er@v1").mkdir(parents=True)
    assert hub.parse_id("own/er@v2") == ("own/er", "v2")
    assert hub.parse_id("own/er") == ("own/er", "")
    assert hub.parse_id("own/er@v1") == ("own/er@v1", ""), "a local folder wins"
    assert hub_folder("own/er@v1", "model") == (Path("own/er@v1"), "local")
    for name in ("own/er@", "@v2", "@"):
        assert hub.parse_id(name) == (name, "")
        with pytest.raises(UserError, match="neither a folder nor a hub id"):
            hub_folder(name, "model")


@pytest.mark.parametrize("name", ["./no/folder", "../none", "/none", "/none@v1", "own/er/more@v1", "~/none",
                                  "own/er/more", "hub://own/er"])
def test_hub_paths_that_do_not_exist(name):
    """The hub is not asked: its answer would be another line."""
    with pytest.raises(UserError, match="no such folder"):
        hub_folder(name, "model")


@pytest.mark.parametrize("name", ["", "a b", "-x", "own/", "\0"])
def test_hub_malformed_ids(name):
    with pytest.raises(UserError, match="neither a folder nor a hub id"):
        hub_folder(name, "model")


def test_hub_offline_is_quick_and_one_line(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = ("from support import hub\ntry: hub.hub_folder('own/er', 'model')\n"
            "except hub.UserError as error: print(error)")
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True,
                         timeout=60)
    assert time.perf_counter() - start < 20
    assert run.stderr == "" and run.stdout.count("\n") == 1
    assert run.stdout.startswith("the model 'own/er' could not be fetched (LocalEntryNotFoundError: ")
