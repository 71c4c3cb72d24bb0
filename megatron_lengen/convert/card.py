"""The README.md of an exported model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lengen.checkpoint_folder import AVERAGED
from megatron_lengen.config_fields import METHOD_FIELDS

# Settings worth a reader's time, by the names of the flags; paths and defaults of the machine stay
# in the checkpoint.
_SETTINGS = (
    "train_iters",
    "train_samples",
    "seq_length",
    "global_batch_size",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
    "optimizer",
    "weight_decay",
    "no_decay_embeddings",
    "decay_all",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "bf16",
    *METHOD_FIELDS,
)


def model_card(title: str, info: Mapping[str, Any], hf: Mapping[str, Any]) -> str:
    """Markdown with what the model is and how it was trained.

    Args:
        title: heading.
        info: the checkpoint's `lengen.json`.
        hf: the exported configuration.
    """
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [megatron_lengen]",
        "---",
        "",
        f"# {title}",
        "",
        f"A `{hf['model_type']}` model trained with megatron_lengen "
        f"(iteration {info.get('iteration', 0)}), converted to Hugging Face's format. Dropout acts "
        "in training only; this model runs without it.",
        "",
    ]
    source = info.get("source", {}).get("name")
    lines += [f"It began as `{source}`.", ""] if source else []
    if info.get(AVERAGED):
        names = ", ".join(f"`{entry['name']}`" for entry in info[AVERAGED])
        lines += [f"The weights are a mean: of {names}.", ""]
    if "auto_map" in hf:
        lines += [
            "Its attention is none that transformers has, so its code comes with it: load it with "
            "`trust_remote_code=True`.",
            "",
        ]
    if hf["model_type"] == "mamba2":
        lines += ["## Layers", "", *_state_space(hf), ""]
    else:
        lines += ["## Attention", "", *_attention(hf), ""]
    arguments = _flat(info.get("arguments", {}))
    rows = [(key, arguments.get(key)) for key in _SETTINGS]
    rows = [(key, value) for key, value in rows if value not in (None, "", [])]
    if rows:
        lines += ["## Training settings", "", "| setting | value |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in rows]
        tokens = info.get("consumed_samples", 0) * (arguments.get("seq_length") or 0)
        lines += [f"| tokens | {tokens} |"] if tokens else []
        lines += [""]
    if info.get("command"):
        lines += ["```bash", _command(info["command"]), "```", ""]
    versions = {name: number for name, number in info.get("versions", {}).items() if number}
    if versions:
        listed = ", ".join(f"{name} {number}" for name, number in versions.items())
        lines += ["## Versions", "", f"Written by {listed}.", ""]
    return "\n".join(lines)


def _command(words: Sequence[str]) -> str:
    """What started the training; places on a disk are nobody's business."""
    script, *flags = words
    shown = ["..." if "/" in flag and not flag.startswith("--") else flag for flag in flags]
    shown = [f"{flag.split('=')[0]}=..." if "/" in flag else flag for flag in shown]
    return shlex.join(["python", script.rpartition("/")[2], *shown])


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name alone; a checkpoint groups them by what they set up."""
    out: dict[str, Any] = {}
    for key, value in arguments.items():
        out.update(_flat(value) if isinstance(value, Mapping) else {key: value})
    return out


def _attention(hf: Mapping[str, Any]) -> list[str]:
    layers, rotary = hf["num_hidden_layers"], hf["rope_parameters"]
    windowed = hf.get("layer_types", []).count("sliding_attention")
    roped = sum(hf.get("no_rope_layers") or [1] * layers)
    window = f"the last {hf.get('sliding_window')} tokens"
    scaled = rotary["rope_type"] != "default"
    scaling = f", {rotary['rope_type']} scaling by {rotary['factor']:g}" if scaled else ""
    lines = [
        f"- {layers} layers, {roped} with rotary positions (base {hf['rope_theta']:g}{scaling}), "
        f"{layers - roped} without"
        if roped
        else f"- {layers} layers without rotary positions",
        f"- {windowed} layers see {window}, {layers - windowed} see everything"
        if windowed
        else "- every layer sees everything",
    ]
    if hf.get("attention_alibi_slopes"):
        biased = sum(slope != 0 for slope in hf["attention_alibi_slopes"])
        lines += [f"- ALiBi's bias on {biased} of {hf['num_attention_heads']} heads"]
    if hf.get("attention_scaling_enabled"):
        scope = "on heads without positions" if hf["attention_scaling_scope"] == "nope" else ""
        lines += [f"- query scaling: {hf['attention_scaling_type']} {scope}".rstrip()]
    if hf.get("attention_function") == "entmax":
        lines += [f"- entmax with alpha {hf['attention_entmax_alpha']:g} in place of softmax"]
    return [*lines, f"- declared for {hf['max_position_embeddings']} positions"]


def _state_space(hf: Mapping[str, Any]) -> list[str]:
    return [
        f"- {hf['num_hidden_layers']} Mamba2 blocks, {hf['num_heads']} heads of {hf['head_dim']} "
        f"channels, a state of {hf['state_size']}, {hf['n_groups']} group(s)",
        '- `A_log`, `D` and `dt_bias` are stored in fp32, and `dtype="auto"` loads every weight in '
        "fp32 so that they stay it; for 16-bit weights beside them, set "
        '`Mamba2PreTrainedModel._keep_in_fp32_modules_strict = ["A_log", "D", "dt_bias"]` first',
    ]
