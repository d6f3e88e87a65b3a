"""From a loaded model and its texts to the finished tables of a run."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprobe import __version__
from headprobe.diagnosis import DEFAULT_SIMILARITY, Diagnosis, diagnose
from headprobe.errors import HeadprobeError, NoAttentionError
from headprobe.profile import Profile, Sampling, glossary, profile
from headprobe.report import Tables, run_folder, write

if TYPE_CHECKING:
    from headprobe.inputs import Source, TextBatches

_ROWS_ACROSS = 512
"""Rows per run on which heads of different layers are compared: their cost grows with the number of
heads squared, and the sampling error is small long before."""

_WIDEST_SAMPLE = 16


@dataclass(frozen=True)
class Settings:
    """What a person can choose about an analysis.

    Attributes:
        similarity: heads of a layer form a group from this average similarity on.
        seed: of all draws.
        all_rows: compare heads on all rows instead of a sample.
    """

    similarity: float = DEFAULT_SIMILARITY
    seed: int = 0
    all_rows: bool = False

    def sampling(self, texts: int) -> Sampling:
        """On which rows heads are compared, given the number of texts."""
        if self.all_rows:
            return Sampling(rows=None, rows_across=None, seed=self.seed)
        across = max(1, _ROWS_ACROSS // max(1, texts))
        few = None if across >= _WIDEST_SAMPLE else across  # None: as many as within a layer
        return Sampling(rows=_WIDEST_SAMPLE, rows_across=few, seed=self.seed)


def run_inputs(source: Source, batches: TextBatches) -> list[dict[str, Any]]:
    """The batches, with the model asked not to make what no statistic needs."""
    parameters = inspect.signature(source.model.forward).parameters
    spared = {} if source.tokenizer is None else {"logits_to_keep": 1, "use_cache": False}
    extra = {name: value for name, value in spared.items() if name in parameters}
    return [{**batch, **extra} for batch in batches.batches]


def analyze(
    source: Source,
    texts: TextBatches,
    settings: Settings,
    inputs: Iterable[Mapping[str, Any]] | None = None,
) -> tuple[Profile, Tables]:
    """Measure a model's heads on texts and say what stands out.

    Args:
        source: the model and where it comes from.
        texts: the texts, tokenised.
        settings: what a person can choose.
        inputs: `run_inputs(source, texts)`, perhaps with a progress bar around it.

    Raises:
        HeadprobeError: if the model has no attention that can be captured truly.
    """
    measured = profile(
        source.model,
        run_inputs(source, texts) if inputs is None else inputs,
        sampling=settings.sampling(texts.texts),
        token_classes=texts.token_classes,
        batch_first=texts.batch_first,
        seconds=texts.seconds,
    )
    if not measured.measured:
        site, reason = next(iter(measured.left_out.items()))
        raise NoAttentionError(
            f"no attention map of {source.name!r} can be shown: in {site!r}, {reason}"
        )
    described = _described(source, texts, settings, measured)
    return measured, tables(measured, described, settings.similarity)


def write_report(
    profile: Profile,
    folder: str | Path,
    *,
    name: str = "given maps",
    similarity: float = DEFAULT_SIMILARITY,
    force: bool = False,
) -> Path:
    """Write a profile's report, as `headprobe analyze` does, without the model.

    Args:
        profile: loaded, merged, or made of given maps.
        folder: it appears whole, or not at all; one that holds an earlier report is replaced.
        name: what to call the model.
        similarity: heads of a layer form a group from this average similarity on, 0 to 1.
        force: replace a folder that holds other files, too.

    Returns:
        The folder.

    Raises:
        HeadprobeError: if the profile has no head, or the folder can't be written or replaced.
        ValueError: if `similarity` is not above 0 and at most 1.
    """
    if not profile.measured:
        raise HeadprobeError("the profile has no head: nothing was measured, so nothing to report")
    described = {
        "model": {"name": name, "fingerprint": profile.settings.get("model")},
        "texts": {"texts": profile.texts, "tokens": profile.tokens},
        "settings": {"similarity": similarity, **_sampled(profile)},
    }
    with run_folder(Path(folder), force=force) as unfinished:
        profile.save(unfinished / "profile.safetensors")
        write(tables(profile, described, similarity), unfinished)
    return Path(folder)


def tables(measured: Profile, described: Mapping[str, Any], similarity: float) -> Tables:
    """The finished tables of a profile.

    Args:
        measured: the profile.
        described: parts of the summary that tell where it comes from.
        similarity: heads of a layer form a group from this average similarity on.
    """
    pairs = measured.pairs()
    found = diagnose(measured.heads(), pairs, measured.layers(), similarity=similarity)
    return Tables(
        heads=found.heads,
        similarity=pairs,
        layers=found.layers,
        intervals=measured.intervals(),
        groups=found.groups,
        flags=found.flags,
        advice=found.advice,
        glossary=glossary({layer.distance_unit for layer in measured.measured}),
        summary=_summary(measured, found, described),
    )


def _sampled(profile: Profile) -> dict[str, Any]:
    """On which rows heads were compared."""
    rows, across = (profile.settings.get(name) for name in ("rows", "rows_across"))
    return {
        "seed": profile.settings.get("seed"),
        "rows": "all" if rows is None else rows,
        "rows_across_layers": across or "the same",
        "most_pairs": profile.settings.get("pairs"),
    }


def _described(
    source: Source, texts: TextBatches, settings: Settings, measured: Profile
) -> dict[str, Any]:
    """What is known of the model, the texts and the settings of a run."""
    return {
        "model": {
            "name": source.name,
            "class": source.class_name,
            "revision": source.revision,
            "weights_sha256": source.weights_sha256,
            "fingerprint": measured.settings["model"],
            **source.made_of,
        },
        **_inputs(texts, measured),
        "settings": {
            "max_tokens": texts.max_tokens,
            "similarity": settings.similarity,
            **_sampled(measured),
            "dtype": str(source.dtype).removeprefix("torch."),
            "device": ", ".join(source.places),
            "attention": getattr(getattr(source.model, "config", None), "_attn_implementation", ""),
            "switched": measured.switched,
        },
    }


def _inputs(texts: TextBatches, measured: Profile) -> dict[str, Any]:
    """What is known of the texts, images or sounds of a run."""
    described: dict[str, Any] = {kind: dict(facts) for kind, facts in texts.media.items()}
    if texts.texts_hash or not texts.media:
        described["texts"] = {
            "texts": measured.texts,
            "tokens": measured.tokens,
            "cut": texts.cut,
            "skipped": texts.skipped,
            "hash": texts.texts_hash,
        }
    return described | ({"notes": list(texts.notes)} if texts.notes else {})


def _summary(measured: Profile, found: Diagnosis, described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tool": "headprobe",
        "verdict": found.verdict,
        "counts": {
            "heads": len(found.heads),
            "layers": len(found.layers),
            "groups": len(found.groups),
            "similar_heads": int((found.heads["verdict"] == "similar").sum()),
            "flags": found.flags["flag"].value_counts().to_dict(),
        },
        **described,
        "layers": [
            {
                "kind": layer.kind,
                "stack": place.stack,
                "layer": place.layer,
                "site": layer.site,
                "captured_at": layer.seam,
                "heads": layer.heads,
                "kv_heads": layer.kv_heads,
                "reconstruction_error": layer.reconstruction_error,
                "output_projection": layer.no_projection or "found",
                "distance_unit": layer.distance_unit or None,
                **({"no_distance": layer.no_distance} if layer.no_distance else {}),
            }
            for layer, place in zip(measured.measured, measured.places(), strict=True)
        ],
        "left_out": [{"site": site, "reason": why} for site, why in measured.left_out.items()],
        "versions": {
            "headprobe": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "scikit-learn")},
        },
        "conventions": "Layers and heads count from 0. Logarithms are natural, entropies in nats.",
    }
