"""The report: files from tables, and the folder they appear in."""

import base64
import csv
import dataclasses
import io
import json
import os
import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headprobe.errors import HeadprobeError
from headprobe.report import Tables, run_folder, write
from headprobe.report.embedded import embedded
from headprobe.report.formatting import csv_text

KEY = ["kind", "stack", "layer", "head"]
EVIL = "<script>alert(1)</script>"
CSV_FILES = ["heads.csv", "similarity.csv", "layers.csv", "intervals.csv"]


def synthetic_tables(layers: int = 2, heads: int = 4) -> Tables:
    """Tables as a run makes them, with made-up figures."""
    rng = np.random.default_rng(7)
    keys = [("bidirectional", "", layer, head) for layer in range(layers) for head in range(heads)]
    count = len(keys)
    table = pd.DataFrame(keys, columns=KEY).assign(
        site=[f"encoder.layer.{layer}.attention" for _, _, layer, _ in keys],
        kv_group=pd.array([None] * count, dtype="Int64"),
        entropy=rng.uniform(0.2, 4.2, count),
        entropy_normalized=rng.beta(2, 2, count),
        distance=rng.gamma(2, 6, count),
        previous=rng.beta(0.5, 4, count),
        special=[np.nan, *rng.beta(1, 2, count - 1)],
        sink=rng.integers(0, 2, count).astype(float),
        output_norm=rng.gamma(3, 400, count),
        nearest_kind="bidirectional",
        nearest_stack="",
        nearest_layer=[float(keys[count - 1 - i][2]) for i in range(count)],
        nearest_head=pd.array([keys[count - 1 - i][3] for i in range(count)], dtype="Int64"),
        nearest_similarity=rng.uniform(0.5, 1, count),
        importance=np.nan,
        group=pd.array([0, 0] + [None] * (count - 2), dtype="Int64"),
        roles=["previous token"] + [None] * (count - 1),
        verdict=["similar", "similar"] + [None] * (count - 2),
        flags=["near_copy;sink", "near_copy"] + [None] * (count - 2),
    )
    pairs = list(combinations(keys, 2))
    sides = [*(f"{c}_a" for c in KEY), *(f"{c}_b" for c in KEY)]
    similarity = pd.DataFrame([(*a, *b) for a, b in pairs], columns=sides).assign(
        js_similarity=[rng.beta(6, 2) if a[2] == b[2] else rng.beta(3, 4) for a, b in pairs],
        overlap=rng.beta(3, 3, len(pairs)),
        cosine=[np.nan if a[2] == 0 else rng.uniform(-0.2, 1) for a, b in pairs],
        cka=np.nan,
    )
    layer_rows = [("bidirectional", "", layer, heads, 2.0 + layer / 7) for layer in range(layers)]
    intervals = table[KEY].assign(
        statistic="entropy",
        value=table["entropy"],
        low=table["entropy"] - 0.1,
        high=table["entropy"] + 0.1,
        reliability=0.98,
    )
    flag = {"kind": "bidirectional", "stack": "", "layer": 0}
    return Tables(
        heads=table,
        similarity=similarity,
        layers=pd.DataFrame(
            layer_rows, columns=["kind", "stack", "layer", "heads", "entropy_mean"]
        ),
        intervals=intervals,
        groups=pd.DataFrame(
            [{**flag, "group": 0, "heads": "0;1", "size": 2, "representative": 1}]
        ).assign(similarity_mean=0.954321, similarity_min=0.954321),
        flags=pd.DataFrame(
            {**flag, "head": head, "flag": name, "value": 0.954321, "threshold": 0.9}
            for head, name in [(0, "near_copy"), (0, "sink"), (1, "near_copy")]
        ).assign(evidence="The map is almost that of another head of the layer."),
        advice=["Look at the group of layer 0 first.", "Measure more texts."],
        glossary=pd.DataFrame(
            [
                ("entropy", "Entropy", "nats", 0.0, np.nan, "Spread of a row.", "Clark 2019"),
                ("js_similarity", "Similarity (JS)", None, 0, 1, "1 - JS / ln 2.", "Lin 1991"),
            ],
            columns=["name", "title", "unit", "low", "high", "definition", "source"],
        ),
        summary={
            "tool": "headprobe",
            "verdict": f"2 of {count} heads are similar to another head of their layer.",
            "command": "headprobe analyze --out /secret/place",
            "started": "2020-01-01T00:00:00",
            "device_host": "secret-host",
            "out": "/secret/place",
            "model": {"name": "tiny-bert", "class": "BertModel", "revision": "abc123"},
            "texts": {"texts": 60, "tokens": 7012, "cut": 3, "source": "/secret/texts"},
            "settings": {"similarity": 0.9, "max_tokens": 128, "all_rows": False},
            "seed": 0,
            "versions": {"torch": "2.13.0"},
            "layers": [{"layer": i, "path": "sdpa", "site": f"l.{i}"} for i in range(layers)],
            "left_out": [{"what": "cka", "why": "not asked for"}],
            "measured": {"mean": float("nan"), "count": np.int64(3)},
        },
    )


@pytest.fixture
def tables() -> Tables:
    return synthetic_tables()


class Page(HTMLParser):
    """Collects a page's rows per section, the tags' attributes, and the text of elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.section = ""
        self.rows: dict[str, list[list[str]]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self._in_cell = self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "section":
            self.section = dict(attrs)["id"]
        elif tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            self.rows[self.section][-1].append("")
        elif tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False
        elif tag == "script":
            self._in_script = False

    def handle_data(self, data):
        if self._in_cell:
            self.rows[self.section][-1][-1] += data.strip("\n")
        elif self._in_script:
            self.scripts[-1] += data


def html(tables: Tables, folder: Path) -> str:
    write(tables, folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8"))))


def test_writes_the_files_of_the_contract(tables, tmp_path):
    written = write(tables, tmp_path)
    assert [path.name for path in written] == ["report.html", *CSV_FILES, "summary.json"]
    assert sorted(tmp_path.iterdir()) == sorted(written)


def test_the_page_holds_a_row_per_head_group_flag_and_layer(tables, tmp_path):
    page = Page(html(tables, tmp_path))
    for section, table in [
        ("heads", tables.heads),
        ("groups", tables.groups),
        ("flags", tables.flags),
        ("layers", tables.layers),
    ]:
        assert len(page.rows[section]) - 1 == len(table), section
    assert [row[1] for row in page.rows["flags"][1:]] == list(tables.flags["flag"])


def test_the_page_counts_flags_and_heads(tables, tmp_path):
    text = html(tables, tmp_path)
    counts = dict(re.findall(r"<dt>([^<]*)</dt><dd>(\d+)</dd>", text))
    assert counts.pop("heads") == str(len(tables.heads))
    assert counts.pop("groups of similar heads") == str(len(tables.groups))
    assert counts == {"flagged near_copy": "2", "flagged sink": "1"}


def test_the_heads_table_shows_figures_and_leaves_out_empty_columns(tables, tmp_path):
    title, *rows = Page(html(tables, tmp_path)).rows["heads"]
    assert "Importance" not in title
    assert "Kv group" not in title
    entropy = title.index("Entropy nats")
    for row, label, value in zip(
        rows, ["L0H0", "L0H1", "L0H2"], tables.heads["entropy"], strict=False
    ):
        assert row[0] == label
        assert float(row[entropy]) == pytest.approx(value, rel=5e-4)
    assert [row[title.index("Special")] == "" for row in rows] == list(
        tables.heads["special"].isna()
    )


def test_the_page_says_how_and_on_what(tables, tmp_path):
    text = html(tables, tmp_path)
    for expected in [
        tables.summary["verdict"],
        "BertModel",
        "abc123",
        "7012",
        "2.13.0",
        "sdpa",
        "not asked for",
        "Layers and heads count from 0. Logarithms are natural, entropies in nats.",
        *tables.advice,
        *tables.glossary["definition"],
    ]:
        assert expected in text


@pytest.mark.parametrize("stray", ["secret", "2020-01-01", "command"])
def test_the_page_names_no_time_place_or_host(tables, tmp_path, stray):
    assert stray not in html(tables, tmp_path)


def test_a_page_without_groups_flags_and_pairs(tables, tmp_path):
    bare = dataclasses.replace(
        tables,
        groups=tables.groups.iloc[:0],
        flags=tables.flags.iloc[:0],
        similarity=tables.similarity.iloc[:0],
        intervals=tables.intervals.iloc[:0],
        glossary=tables.glossary.iloc[:0],
        advice=[],
        summary={},
    )
    text = html(bare, tmp_path)
    assert "No head carries a flag." in text
    assert len(Page(text).rows["heads"]) - 1 == len(tables.heads)


def test_streams_are_told_apart(tables):
    cross = tables.heads.assign(kind="cross", stack="decoder")
    both = dataclasses.replace(tables, heads=pd.concat([tables.heads, cross], ignore_index=True))
    data = embedded(both)
    assert data["grids"] == ["bidirectional", "decoder"]
    assert data["labels"][0] == "bidirectional L0H0"
    assert data["labels"][-1] == "decoder L1H3"


def unpacked(data: dict, measure: str) -> dict[int, float]:
    """A measure's value per place in the upper triangle, as the page's script reads it."""
    entry = next(m for m in data["pairs"]["measures"] if m["name"] == measure)
    steps = np.frombuffer(base64.b64decode(entry["data"]), dtype="<u2")
    places = range(len(steps))
    if data["pairs"]["positions"] is not None:
        places = np.frombuffer(base64.b64decode(data["pairs"]["positions"]), dtype="<u4")
    span = entry["to"] - entry["from"]
    return {
        int(place): entry["from"] + span * int(step) / 65534
        for place, step in zip(places, steps, strict=True)
        if step != 65535
    }


@pytest.mark.parametrize("measure", ["js_similarity", "overlap", "cosine"])
def test_pairs_survive_packing(tables, measure):
    values = tables.similarity[measure]
    found = unpacked(embedded(tables), measure)
    assert found == pytest.approx(values.dropna().to_dict(), abs=2e-5)


def test_few_pairs_are_packed_with_their_places(tables):
    few = dataclasses.replace(tables, similarity=tables.similarity.iloc[[3, 20]])
    data = embedded(few)
    assert data["pairs"]["positions"] is not None
    assert set(unpacked(data, "overlap")) == {3, 20}


def test_an_unmeasured_similarity_is_not_offered(tables):
    names = [measure["name"] for measure in embedded(tables)["pairs"]["measures"]]
    assert names == ["js_similarity", "overlap", "cosine"]


def test_names_tokens_and_evidence_are_text(tables, tmp_path):
    hostile = dataclasses.replace(
        tables,
        heads=tables.heads.assign(site=EVIL, roles=f"attends to {EVIL}"),
        flags=tables.flags.assign(flag=EVIL, evidence=f"{EVIL} & '\"\u2028"),
        advice=[EVIL],
        glossary=tables.glossary.assign(title=EVIL, definition=f'"{EVIL}', source=EVIL),
        summary={
            "verdict": EVIL,
            "model": {"name": EVIL, "class": EVIL, "revision": EVIL},
            "texts": {EVIL: 1},
            "settings": {"token": EVIL},
            "left_out": [EVIL],
            "layers": [{EVIL: EVIL}],
        },
    )
    text = html(hostile, tmp_path)
    page = Page(text)
    assert text.count("<script") == 2  # the data and the program
    assert "alert(1)" in page.scripts[0]
    assert "alert(1)" not in page.scripts[1]
    assert "<" not in page.scripts[0]
    assert "&" not in page.scripts[0]
    assert "\u2028" not in page.scripts[0]
    assert json.loads(page.scripts[0])["values"]["site"][0] == EVIL
    assert [row[4] for row in page.rows["flags"][1:]] == [f"{EVIL} & '\"\u2028"] * 3


def test_the_page_asks_the_network_for_nothing(tables, tmp_path):
    text = html(tables, tmp_path)
    policy = [value for tag, name, value in Page(text).attributes if "default-src" in value]
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none';")
    references = [
        value
        for _, name, value in Page(text).attributes
        if name in ("src", "href", "srcset", "action", "data", "poster")
    ]
    assert all(value.startswith("#") for value in references)
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(", text)
    # The only address is the name of the SVG namespace, which nothing is loaded from.
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_program_never_reads_data_as_html(tables, tmp_path):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(", html(tables, tmp_path))


def test_every_table_cell_of_a_title_row_has_a_scope(tables, tmp_path):
    text = html(tables, tmp_path)
    assert text.count("<th ") == text.count("<th scope=")
    assert text.count("<table") == text.count("<caption")


def test_the_same_tables_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(synthetic_tables(), tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_a_page_of_270_heads_stays_small(tmp_path):
    assert len(html(synthetic_tables(30, 9), tmp_path)) < 1_000_000


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (0.123456789, "0.123457"),
        (1234567.0, "1.23457e+06"),
        (3.0, "3"),
        (-0.5, "-0.5"),
        (-0.0, "0"),
        (float("nan"), ""),
        (None, ""),
        (12345678, "12345678"),
        (np.float32(0.25), "0.25"),
        (pd.NA, ""),
        (True, "True"),
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@a", "'@a"),
        ("\ta", "'\ta"),
        ("a=1", "a=1"),
        ("注意", "注意"),
    ],
)
def test_csv_cells(value, cell):
    table = pd.DataFrame({"x": pd.Series([value], dtype=object), "y": "end"})
    assert csv_text(table) == f"x,y\n{cell},end\n"


def test_csv_tables_hold_the_tables(tables, tmp_path):
    write(tables, tmp_path)
    for name in CSV_FILES:
        table = getattr(tables, name.removesuffix(".csv"))
        rows = read_csv(tmp_path / name)
        assert list(rows[0]) == list(table.columns)
        assert len(rows) == len(table)
        assert b"\r" not in (tmp_path / name).read_bytes()
    heads = read_csv(tmp_path / "heads.csv")
    assert [row["nearest_layer"] for row in heads] == ["1"] * 4 + ["0"] * 4
    assert [row["group"] for row in heads] == ["0", "0", *[""] * 6]
    assert heads[0]["special"] == ""
    assert sum(float(row["entropy"]) for row in heads) == pytest.approx(
        tables.heads["entropy"].sum(), rel=1e-5
    )


def test_summary_is_json_with_null_for_what_is_missing(tables, tmp_path):
    write(tables, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["tool"] == "headprobe"
    assert summary["measured"] == {"mean": None, "count": 3}
    assert list(summary)[:2] == ["tool", "verdict"]


def test_a_path_that_is_not_unicode_can_be_written(tables, tmp_path):
    tables.summary["command"] = "analyze \udcff"
    write(tables, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_bytes())["command"] == "analyze \udcff"


# The folder of a run


def earlier_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"tool": "headprobe"}')
    return folder


def fill(folder: Path, *, force: bool = False, error: type[BaseException] | None = None) -> None:
    with run_folder(folder, force=force) as temporary:
        (temporary / "new").touch()
        if error is not None:
            raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_fresh_folder_appears_with_its_parents(tmp_path):
    with run_folder(tmp_path / "a" / "b") as temporary:
        assert temporary.parent == tmp_path / "a"
        assert temporary.name.startswith(".")
        assert not (tmp_path / "a" / "b").exists()
        (temporary / "new").touch()
    assert names(tmp_path / "a") == ["b"]
    assert names(tmp_path / "a" / "b") == ["new"]


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(Path("run"))
    assert names(tmp_path) == ["run"]


def test_the_folder_has_ordinary_permissions(tmp_path):
    fill(tmp_path / "run")
    (tmp_path / "ordinary").mkdir()
    assert (tmp_path / "run").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_an_earlier_run_is_replaced_as_a_whole(tmp_path):
    run = earlier_run(tmp_path / "run")
    fill(run)
    assert names(run) == ["new"]
    assert names(tmp_path) == ["run"]


def test_an_empty_folder_is_replaced(tmp_path):
    (tmp_path / "run").mkdir()
    fill(tmp_path / "run")
    assert names(tmp_path / "run") == ["new"]


@pytest.mark.parametrize("summary", [None, "{}", '{"tool": "other"}', "[1]", "no json", "\udcff"])
def test_a_folder_of_something_else_is_refused_before_the_run(tmp_path, summary):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").touch()
    if summary is not None:
        (run / "summary.json").write_bytes(summary.encode("utf-8", "surrogateescape"))
    before = names(run)
    with pytest.raises(HeadprobeError, match=r"--out, or replace this one with --force\.$"):
        fill(run, error=AssertionError)  # would come instead, if the block ran
    assert names(run) == before
    assert names(tmp_path) == ["run"]


def test_force_replaces_a_folder_of_something_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    fill(tmp_path / "run", force=True)
    assert names(tmp_path / "run") == ["new"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_run_leaves_the_old_one(tmp_path, error):
    run = earlier_run(tmp_path / "run")
    with pytest.raises(error):
        fill(run, error=error)
    assert names(run) == ["summary.json"]
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_first_run_leaves_nothing(tmp_path, error):
    with pytest.raises(error):
        fill(tmp_path / "a" / "run", error=error)
    assert names(tmp_path) == []


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(HeadprobeError, match="is a file where a folder was expected"):
        fill(tmp_path / "run", force=True)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HeadprobeError, match=r"can't be written \(.+\); choose another with --out"):
        fill(tmp_path / "file" / "run")
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_parent_without_write_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(HeadprobeError, match="can't be written"):
        fill(tmp_path / "closed" / "run")


def test_a_link_is_never_followed(tmp_path):
    target = earlier_run(tmp_path / "target")
    (tmp_path / "run").symlink_to(target)
    with pytest.raises(HeadprobeError, match="symbolic link"):
        fill(tmp_path / "run", force=True)
    assert names(target) == ["summary.json"]


def test_a_link_inside_an_old_run_keeps_its_target(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "mine").touch()
    run = earlier_run(tmp_path / "run")
    (run / "texts").symlink_to(tmp_path / "texts")
    fill(run)
    assert names(tmp_path / "texts") == ["mine"]


def test_the_current_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeadprobeError, match="holds the current folder"):
        fill(Path("."), force=True)


def test_results_survive_a_move_that_fails(tmp_path, monkeypatch):
    run = earlier_run(tmp_path / "run")
    rename = Path.rename

    def refuse_new(self, target):
        if Path(target) == run and "old" not in self.name:
            raise OSError("refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(HeadprobeError, match="results are finished"):
        fill(run)
    assert names(run) == ["summary.json"]
    (kept,) = [path for path in tmp_path.iterdir() if path != run]
    assert names(kept) == ["new"]
