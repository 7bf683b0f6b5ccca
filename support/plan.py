"""The memory plan: what a setting takes on a card, before any weights are there.

The model's own code runs forward and backward on tensors without data (torch's FakeTensorMode), and every allocation
is counted while it lives. To be quick, the model has one decoder layer of each kind and few rows; a layer more, or a
row more, adds what the two differ by. A test compares the result with the allocations of real runs.

What a CUDA card adds is assumed, not measured: RESERVE and MARGIN.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import sys
import weakref
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from support import kv_cache
from geoqa import format_question
from support.errors import UserError
from support.hub import hub_folder
from support.models import (
    KERNELS,
    SUPPORTED_MODELS,
    add_lora,
    checkpoints_activations,
    fused_kernels,
    precision,
    quiet_libraries,
    without_kernel,
)
from vision_tokens import encode_figures, encode_prompts, vision_token_count

GIB = 2**30
RESERVE, MARGIN = GIB, 0.03  # bytes, and a share, of a card: for CUDA itself, fragments, and what drives a screen
CARDS = 24, 16, 12  # GiB
PROMPT_TOKENS = 512  # assumed before the questions are known: 320 of the figure, the rest text
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # a weight, and its share of the doubly quantised scales
MOST_TOKENS_PER_MICRO_BATCH = 16384  # so many keep a GPU busy; more would only take memory


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside it while they live: `now`, and the highest, `peak`."""

    def __enter__(self):
        self.now = self.peak = 0
        self.living = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and id(tensor.untyped_storage()) not in given:  # a view takes nothing
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        key, size = id(storage), storage.nbytes()
        if key in self.living and self.living[key]() is storage:
            return

        def gone(reference):
            self.now -= size
            if self.living.get(key) is reference:
                del self.living[key]

        self.living[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Affine:
    """Bytes = base + each * n, from measurements at n = 1 and 2."""

    base: float
    each: float

    @classmethod
    def through(cls, one, two):
        return cls(2 * one - two, two - one)

    def __call__(self, n):
        return max(0.0, self.base + self.each * n)


# ------------------------------------------------------------------------------------------- The model without data


class DequantisedLinear(torch.nn.Module):
    """Takes what a 4-bit layer takes: its whole weight in the computing type, while it computes."""

    def __init__(self, linear):
        super().__init__()
        self.out_features = linear.out_features
        # PEFT asks for its device and type.
        self.weight = torch.nn.Parameter(linear.weight[:, :1].contiguous(), requires_grad=False)

    def forward(self, x):
        out = DequantisedProduct.apply(x, self.out_features)
        return out.clone()  # as PEFT does around a 4-bit layer


class DequantisedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_features):
        ctx.in_features = x.shape[-1]
        return x @ x.new_empty(x.shape[-1], out_features)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ gradient.new_empty(gradient.shape[-1], ctx.in_features), None


class FusedDeltaRule(torch.autograd.Function):
    """Takes what flash-linear-attention's chunk_gated_delta_rule takes (sizes read in fla/ops/gated_delta_rule/chunk.py
    of its version 0.6.0), and computes nothing."""

    @staticmethod
    def forward(ctx, query, key, value, g, beta, keep_state):
        rows, length, heads, width = value.shape
        normed = query.clone(), key.clone()
        o, *beside = (torch.empty_like(value) for _ in range(4))  # w, u, new values
        a, decay = value.new_empty(rows, length, heads, 64), g.float()
        beside.append(value.new_empty(rows, math.ceil(length / 64), heads, key.shape[-1], width))  # states
        ctx.save_for_backward(*normed, value, decay, beta, a)
        state = value.new_empty(rows, heads, key.shape[-1], width, dtype=torch.float32) if keep_state else None
        return o, state

    @staticmethod
    def backward(ctx, gradient, _):
        query, key, value, decay, beta, a = ctx.saved_tensors
        rows, length, heads, width = value.shape
        dv, *beside = (torch.empty_like(value) for _ in range(6))  # w, u, new values, local dv, dw
        beside.append(value.new_empty(2, rows, math.ceil(length / 64), heads, key.shape[-1], width))  # states, theirs
        beside += [value.new_empty(rows, length, heads, key.shape[-1]) for _ in range(3)]  # dq, dk, dk2
        return query.clone(), key.clone(), dv, decay.clone(), beta.clone(), None


def fused_delta_rule(query, key, value, g, beta, output_final_state=False, **kwargs):
    return FusedDeltaRule.apply(query, key, value, g, beta, output_final_state)


class Skeleton:
    """One decoder layer of each kind, with its adapter, on tensors without data.

    `kinds` and `counts`: the kinds of layers and how many of each the whole model has. `weights`: its bytes by group.
    """

    def __init__(self, whole, rank, nf4, dtype, checkpointing):
        from transformers import AutoModelForImageTextToText

        all_kinds = list(getattr(whole.text_config, "layer_types", None)
                         or ["full_attention"] * whole.text_config.num_hidden_layers)
        self.kinds = list(dict.fromkeys(all_kinds))
        self.counts = [all_kinds.count(kind) for kind in self.kinds]
        config = copy.deepcopy(whole)
        config.text_config.num_hidden_layers, config.text_config.layer_types = len(self.kinds), self.kinds
        with torch.device("meta"):
            base = AutoModelForImageTextToText.from_config(config, dtype=dtype).requires_grad_(False)
            peft = add_lora(base, "", rank)
        self.model, self.text, self.dtype = base, base.model.language_model, dtype
        self.weigh(nf4)
        if nf4:
            for module in peft.modules():
                if hasattr(module, "base_layer"):
                    module.base_layer = DequantisedLinear(module.base_layer)
        if checkpointing:
            base.activation_checkpointing_enable()
        with FakeTensorMode() as self.mode:
            give_storage(peft)
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)  # gradients are counted with the weights

    def weigh(self, nf4):
        """Sets `weights`, bytes of the whole model by group, and `adapter_size`, the adapter's number of weights."""
        groups = dict.fromkeys(("vision tower", "embedding and head", "language model, 4-bit",
                                "language model, not 4-bit"), 0)
        self.adapter_size = 0
        for name, parameter in self.model.named_parameters():  # tied ones once
            layer = name.partition("language_model.layers.")[2].partition(".")[0]
            size = parameter.numel() * (self.counts[int(layer)] if layer else 1)
            if parameter.requires_grad:
                self.adapter_size += size
            elif ".visual." in name:
                groups["vision tower"] += size * parameter.itemsize
            elif "embed_tokens" in name or "lm_head" in name:
                groups["embedding and head"] += size * parameter.itemsize
            elif nf4 and ".base_layer." in name:
                groups["language model, 4-bit"] += size * NF4_BYTES
            else:
                groups["language model, not 4-bit"] += size * parameter.itemsize
        self.weights = {name: size for name, size in groups.items() if size}

    def forward(self, rows, width, cached=0, **inputs):
        """The language model on `rows` rows of `width` new tokens behind `cached` old ones -> last hidden states."""
        mask = torch.ones(rows, 1, width, cached + width, dtype=torch.bool) if "cache" in inputs else None
        if mask is not None and "linear_attention" in self.kinds:
            mask = {"full_attention": mask, "linear_attention": None if width == 1 else mask[:, 0, 0]}
        return self.text(inputs_embeds=self.text.embed_tokens(torch.zeros(rows, width, dtype=torch.long)),
                         attention_mask=mask, position_ids=torch.zeros(3, rows, width, dtype=torch.long),
                         **inputs).last_hidden_state

    def whole_model(self, each):
        """Bytes of each kind of layer -> those of all layers."""
        return sum(count * size for count, size in zip(self.counts, each))


def give_storage(model):
    """Replaces tensors on the meta device by ones of the running FakeTensorMode; tied ones stay tied."""
    made = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is not None and id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if name in module._parameters else new
                store[name] = None if old is None else made[id(old)]


@contextlib.contextmanager
def delta_rule(skeleton, fused):
    """Puts the torch reference of the gated delta rule, or the sizes of the fused one, into the model's code.

    No kernel that is installed may run: on tensors without data it fails.
    """
    module = sys.modules[type(skeleton.text).__module__]
    installed = {name: getattr(module, name) for name in KERNELS if hasattr(module, name)}
    for name, function in installed.items():
        setattr(module, name, fused_delta_rule if fused and "chunk" in name else without_kernel(name, function))
    try:
        yield
    finally:
        for name, function in installed.items():
            setattr(module, name, function)


# ----------------------------------------------------------------------------------------------------- The phases


# Rows this short stand for longer ones, which the reference's loop over chunks of 64 tokens would make slow.
SHORT = 256


def learning(skeleton, rows, width):
    """Forward and backward over `rows` rows of `width` tokens -> bytes: inputs kept by the layers, the rest's peak."""
    scale, entered = max(1, width / SHORT), []  # bytes at the start of each layer and of the last norm
    with skeleton.mode, Allocations() as memory:
        hooks = [module.register_forward_pre_hook(lambda *_: entered.append(memory.now)) for module in
                 (*skeleton.text.layers, skeleton.text.norm)]
        skeleton.model.train()
        hidden = skeleton.forward(rows, min(width, SHORT), use_cache=False)
        kept = [after - before for before, after in itertools.pairwise(entered)]
        memory.peak = memory.now
        hidden.backward(torch.zeros_like(hidden))
        for hook in hooks:
            hook.remove()
    return {"kept": skeleton.whole_model(kept) * scale, "layers": (memory.peak - sum(kept)) * scale}


def head(program, skeleton, tokens):
    """Log-probabilities of `tokens` tokens and their gradient -> bytes, one chunk's logits among them."""
    with skeleton.mode, Allocations() as memory:
        output = skeleton.model.get_output_embeddings()
        hidden = torch.zeros(1, tokens, output.in_features, dtype=skeleton.dtype, requires_grad=True)
        states = (hidden * 1).reshape(tokens, -1)
        chunks = zip(states.split(program.LOGIT_CHUNK),
                     torch.zeros(tokens, dtype=torch.long).split(program.LOGIT_CHUNK))
        logprobs = torch.cat([checkpoint(program.token_logprobs, output, some, targets,
                                         torch.zeros(4, dtype=torch.long), 1.0, use_reentrant=False)
                              for some, targets in chunks])
        logprobs.sum().backward()
    return memory.peak


@torch.no_grad()
def sampling(program, skeleton, rows, prompt, completion):
    """`rows` prompts, one completion each -> bytes: prefill beside its cache, caches, a decoded token beside them."""
    from transformers import DynamicCache

    output, short = skeleton.model.eval().get_output_embeddings(), min(prompt, SHORT)
    with skeleton.mode, Allocations() as memory:
        cache = DynamicCache(config=skeleton.model.config)
        logits = output(skeleton.forward(rows, short, cache=cache, use_cache=True)[:, -1:])[:, -1]
        prefill = (memory.peak - sum(cache_bytes(cache))) * prompt / short
        cache = kv_cache.join_caches([cache])
        kv_cache.extend(cache, prompt - short)
        prefilled = cache_bytes(cache)
        # Buffers grow once more for the last block of tokens.
        grown = kv_cache.BLOCK * ((completion - 1) // kv_cache.BLOCK)
        kv_cache.extend(cache, grown)
        beside = memory.now - sum(cache_bytes(cache))
        memory.peak = memory.now
        program.draw_tokens(logits, torch.zeros(4, dtype=torch.long), 1.0, 1.0)
        drawn, memory.peak = memory.peak - sum(cache_bytes(cache)), memory.now
        output(skeleton.forward(rows, 1, prompt + grown, cache=cache, use_cache=True))
    full = cache_bytes(cache)
    recurrent = [size if kind == "linear_attention" else 0 for kind, size in zip(skeleton.kinds, full)]
    return {"prefill": prefill, "prompt cache": skeleton.whole_model(prefilled),
            "recurrent": skeleton.whole_model(recurrent),
            "attention": skeleton.whole_model(full) - skeleton.whole_model(recurrent),
            "logits": drawn - beside, "layer": memory.peak - beside - sum(full)}


def cache_bytes(cache):
    """-> bytes of each layer."""
    def tensors(layer):
        yield from getattr(layer, "buffers", None) or (getattr(layer, name, None) for name in ("keys", "values"))
        for name in ("conv_states", "recurrent_states"):
            yield from getattr(layer, name, {}).values()

    return [sum(t.untyped_storage().nbytes() for t in tensors(layer) if t is not None) for layer in cache.layers]


def room_of(card):
    """Bytes of a card that tensors of ours may take."""
    return card * (1 - MARGIN) - RESERVE


class Plan:
    """The bytes of each phase as functions of the rows at once, for one path of the gated delta rule."""

    def __init__(self, program, skeleton, config, prompt, fused=False):
        """`prompt`: tokens of the longest prompt; `fused`: with flash-linear-attention."""
        self.config, self.fused, self.width = config, fused, prompt + config.max_tokens
        with delta_rule(skeleton, fused):
            learned = [learning(skeleton, rows, self.width) for rows in (1, 2)]
            sampled = [sampling(program, skeleton, rows, prompt, config.max_tokens) for rows in (1, 2)]
        self.learned = {name: Affine.through(*(rows[name] for rows in learned)) for name in learned[0]}
        self.sampled = {name: Affine.through(*(rows[name] for rows in sampled)) for name in sampled[0]}
        self.logit_chunk = program.LOGIT_CHUNK
        self.head_chunks = Affine.through(*(head(program, skeleton, n * self.logit_chunk) for n in (1, 2)))
        self.weights = dict(skeleton.weights)
        self.adapter = 4 * skeleton.adapter_size
        self.optimizer = 0 if config.eval_only else 2 * self.adapter
        self.prefill_at_once = max(1, program.PREFILL_TOKENS // prompt)

    @property
    def fixed(self):
        """What is there in every phase."""
        return sum(self.weights.values()) + self.adapter + self.optimizer

    def prefill(self, rows, group_size):
        prompts = math.ceil(rows / group_size)
        return (self.sampled["prefill"](min(prompts, self.prefill_at_once))
                + self.sampled["prompt cache"](prompts))

    def decoding(self, rows):
        return (self.sampled["attention"](rows) + self.sampled["recurrent"](rows)
                + max(self.sampled["logits"](rows), self.sampled["layer"](rows)))

    def sampling_peak(self, rows, group_size):
        return self.fixed + max(self.prefill(rows, group_size), self.decoding(rows))

    def learning_rows(self, tokens):
        return max(1, tokens // self.width)

    def head(self, rows):
        """Bytes of the output head at its peak, for completions of full length."""
        return self.head_chunks(rows * self.config.max_tokens / self.logit_chunk)

    def learning_peak(self, tokens):
        rows = self.learning_rows(tokens)
        return (self.fixed + self.adapter + self.learned["kept"](rows)  # adapter: its gradient
                + max(self.head(rows), self.learned["layers"](rows)))

    def most_rows(self, rows, group_size, room):
        """The most rows up to `rows` that can be drawn at once in `room` bytes; at least 1."""
        fitting = (n for n in range(rows, 1, -1) if self.sampling_peak(n, group_size) <= room)
        return next(fitting, 1)

    def most_tokens(self, room):
        """The largest micro-batch in `room` bytes, in tokens; at least one row."""
        rows = (n for n in range(MOST_TOKENS_PER_MICRO_BATCH // self.width, 1, -1)
                if self.learning_peak(n * self.width) <= room)
        return next(rows, 1) * self.width

    def choose(self, card):
        """-> (the config with what it leaves open set for a card of `card` bytes, the peak of each phase)."""
        config, room = self.config, room_of(card)
        rows = config.batch_size * config.group_size
        at_once = config.rollouts_at_once or self.most_rows(max(rows, config.eval_batch_size), 1, room)
        tokens = config.tokens_per_micro_batch or self.most_tokens(room)
        peaks = {} if config.eval_only else {
            "sampling": self.sampling_peak(min(rows, at_once), config.group_size),
            "learning": self.learning_peak(tokens)}
        if config.evaluate:
            peaks["evaluation"] = self.sampling_peak(min(config.eval_batch_size, at_once), 1)
        return dataclasses.replace(config, rollouts_at_once=at_once, tokens_per_micro_batch=tokens), peaks

    def shorter(self, max_tokens):
        """The plan of completions of at most `max_tokens` tokens: what a row takes goes with its length."""
        other, prompt = copy.copy(self), self.width - self.config.max_tokens
        other.config, other.width = dataclasses.replace(self.config, max_tokens=max_tokens), prompt + max_tokens
        other.learned, other.sampled = ({
            name: f if name in ("recurrent", "logits", "layer", "prefill", "prompt cache")
            else Affine(f.base, f.each * other.width / self.width) for name, f in of.items()}
            for of in (self.learned, self.sampled))
        return other

    def fits(self, room):
        """Whether one row at a time fits into `room` bytes."""
        return max(self.sampling_peak(1, 1), 0 if self.config.eval_only else self.learning_peak(1)) <= room

    def advice(self, card):
        """The flag that lowers the highest peak most, or "" where everything fits."""
        chosen, peaks = self.choose(card)
        room, phase = room_of(card), max(peaks, key=peaks.get)
        if peaks[phase] <= room:
            return ""
        if self.fixed > room:
            return "a smaller --base-model" if chosen.quantization != "none" else "--quantization nf4"
        lengths = range(self.config.max_tokens // 64 * 64, 0, -64)
        fitting = next((length for length in lengths if self.shorter(length).fits(room)), None)
        shorter = f"--max-tokens {fitting}" if fitting else "a smaller --base-model"
        if phase == "learning":
            if chosen.activation_checkpointing == "off":
                return "--activation-checkpointing on"
            return shorter if self.learning_rows(chosen.tokens_per_micro_batch) == 1 else (
                f"--tokens-per-micro-batch {self.most_tokens(room)}")
        fitting = self.most_rows(chosen.rollouts_at_once, 1, room)
        return shorter if fitting == 1 else f"--rollouts-at-once {fitting}"


def make_plans(program, config, whole, prompt=PROMPT_TOKENS, fused=(False, True)):
    """-> [Plan], without and with flash-linear-attention, which is nothing to a model without gated delta rule.

    `program` is the module grpo, whose functions are run; `whole` the configuration of the model.
    """
    device_type = "cpu" if config.device == "cpu" else "cuda"
    dtype, nf4 = precision(config.quantization, device_type)
    skeleton = Skeleton(whole, config.lora_rank, nf4, dtype,
                        checkpoints_activations(config.activation_checkpointing, device_type))
    if config.teacher_model:
        teacher = Skeleton(model_config(config.teacher_model)[0], config.lora_rank, nf4, dtype, False)
        skeleton.weights["teacher"] = sum(teacher.weights.values())
    fused = fused if "linear_attention" in skeleton.kinds else (False,)
    return [Plan(program, skeleton, config, prompt, way) for way in fused]


# ---------------------------------------------------------------------------------------------------- What is shown


PATHS = {False: "torch reference", True: "flash-linear-attention"}


def plan_text(program, config):
    """What `--plan` prints. `program` is the module grpo. Raises UserError for a run on the CPU."""
    if config.device == "cpu":
        raise UserError("--plan is about a GPU's memory: give --device cuda, whether there is one here or not")
    quiet_libraries(torch.device("cpu"))
    if config.eval_only:  # a question has one completion there
        config = dataclasses.replace(config, batch_size=config.eval_batch_size, group_size=1)
    whole, source = model_config(config.base_model, config.model_revision)
    plans = make_plans(program, config, whole)
    card = card_bytes()
    columns = [plan_rows(plan, card) for plan in plans]
    lines = [f"memory plan of {config.base_model} ({source}): {config.batch_size} questions x {config.group_size} "
             "completions,",
             f"prompts of {PROMPT_TOKENS} tokens, at most {config.max_tokens:,} new ones. GiB, by the sizes "
             "of all tensors, not measured on a card.", "",
             f"{'gated delta rule:':42}" + "".join(f"{PATHS[plan.fused]:>25}" for plan in plans)]
    for row, name in enumerate(columns[0]):
        lines.append(f"{name:42}" + "".join(f"{list(column.values())[row]:>25}" for column in columns))
    lines.append("A peak is the base, the adapter, its moments, and the largest of what comes one after another.")
    for plan in plans:
        lines += ["", f"cards, {PATHS[plan.fused]}:"]
        lines += [card_line(plan, size * GIB) for size in sorted({*CARDS, round(card / GIB)}, reverse=True)]
    return "\n".join(lines)


def plan_rows(plan, card):
    """Name -> text of each line of one column."""
    config, peaks = plan.choose(card)
    rows = min(config.batch_size * config.group_size, config.rollouts_at_once)
    learned = plan.learning_rows(config.tokens_per_micro_batch)
    sizes = {f"base: {name}": size for name, size in plan.weights.items()} | {
        "adapter": plan.adapter, "AdamW's two moments": plan.optimizer,
        "sampling: keys and values": plan.sampled["attention"](rows),
        "sampling: recurrent states": plan.sampled["recurrent"](rows),
        "sampling: logits of a token": plan.sampled["logits"](rows),
        "prefill, before that": plan.prefill(rows, config.group_size),
        "learning: gradient": plan.adapter, "learning: kept for the backward pass": plan.learned["kept"](learned),
        "learning: the largest layer": plan.learned["layers"](learned),
        "learning: a chunk of logits": plan.head(learned)}
    sizes |= {f"peak of {phase}": peak for phase, peak in peaks.items()}
    text = {"completions drawn at once": rows, "tokens (completions) in a micro-batch":
            f"{config.tokens_per_micro_batch:,} ({learned})"} | {
        name: f"{size / GIB:.2f}" for name, size in sizes.items()}
    if config.eval_only:
        text = {name: value for name, value in text.items() if "learning" not in name and "micro-batch" not in name}
    total = max(peaks.values()) + RESERVE
    return text | {f"total with {RESERVE / GIB:.0f} for CUDA itself": f"{total / GIB:.2f} of {card / GIB:.0f}"}


def card_line(plan, card):
    """Whether it fits a card, and with which flags."""
    config, peaks = plan.choose(card)
    if advice := plan.advice(card):
        return f"{card / GIB:5.0f} GiB  does not fit; what helps most: {advice}"
    return (f"{card / GIB:5.0f} GiB  fits: {(max(peaks.values()) + RESERVE) / GIB:.1f} GiB; a run on it chooses "
            f"--rollouts-at-once {config.rollouts_at_once} --tokens-per-micro-batch {config.tokens_per_micro_batch}")


def card_bytes(device=None):
    """Memory of the CUDA card; 24 GiB where there is none."""
    return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else CARDS[0] * GIB


def model_config(name, revision=""):
    """-> (the model's configuration, where it is from): a folder, the hub, or for the default model a table here."""
    from transformers import AutoConfig, Qwen3_5Config

    try:
        folder, _ = hub_folder(name, "model", revision, ["config.json"])
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (UserError, OSError, ValueError) as error:
        if name != DEFAULT_MODEL:
            raise UserError(f"the memory plan needs config.json of {name}: {error}") from error
        return Qwen3_5Config(**copy.deepcopy(QWEN3_5_4B)), "sizes built in, the hub is out of reach"
    if whole.model_type not in SUPPORTED_MODELS:
        raise UserError(f"{name} is a {whole.model_type} model; supported are {', '.join(SUPPORTED_MODELS)}")
    return whole, "its config.json"


DEFAULT_MODEL = "Qwen/Qwen3.5-4B"
QWEN3_5_4B = {  # its config.json on the hub
    "text_config": {
        "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True,
            "partial_rotary_factor": 0.25}},
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
        "num_position_embeddings": 2304, "patch_size": 16},
    "tie_word_embeddings": True}


# ------------------------------------------------------------------------------------------------------ In a real run


@contextlib.contextmanager
def memory_phase(name, flag):
    """Turns an out-of-memory error into a UserError that names the phase and the flag. Also a decorator."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory in {name}: lower {flag} (--plan shows what each phase takes)") from error


def fit_memory(program, policy, questions, config):
    """Sets in `config` what it leaves to the plan, says what will be taken, and tries the worst case once.

    `program` is the module grpo, `questions` those that will be asked. Raises UserError where memory runs out.
    """
    count, group_size = config.batch_size, config.group_size
    if config.eval_only:
        count, group_size = min(config.eval_batch_size, len(questions)), 1
    prompts = encode_prompts(policy.tokenizer, policy.image_processor, longest_questions(
        policy, questions, count, config.max_image_tokens), config.max_image_tokens).to(policy.device)
    card = card_bytes(policy.device)
    plan, = make_plans(program, config, policy.base.config, prompts.input_ids.shape[1],
                       (fused_kernels(policy.base, config.fused_kernels),))
    chosen, peaks = plan.choose(card)
    config.rollouts_at_once, config.tokens_per_micro_batch = chosen.rollouts_at_once, chosen.tokens_per_micro_batch
    tqdm.write(f"memory plan: --rollouts-at-once {config.rollouts_at_once} --tokens-per-micro-batch "
               f"{config.tokens_per_micro_batch}, GiB of {card / GIB:.1f}: "
               + ", ".join(f"{phase} {peak / GIB:.1f}" for phase, peak in peaks.items()))
    try:
        dry_run(program, policy, prompts, group_size, config)
    except UserError as error:
        raise UserError(f"{error}; by the memory plan, what helps most is "
                        f"{plan.advice(card) or 'a little less of that'}") from error


def longest_questions(policy, questions, count, max_image_tokens):
    """The `count` questions with the longest prompts: characters of the text, tokens of the figure. Few ones repeat."""
    lengths = [len(format_question(question)) + vision_token_count(policy.image_processor, question.image,
                                                                   max_image_tokens) for question in questions]
    order = sorted(range(len(questions)), key=lengths.__getitem__, reverse=True)
    return [questions[i] for i in itertools.islice(itertools.cycle(order), count)]


def dry_run(program, policy, prompts, group_size, config):
    """The largest wave with its cache full, and the largest micro-batch, once: what cannot fit stops before step 1."""
    rows, device = torch.arange(len(prompts.ids) * group_size, device=policy.device), policy.device
    width = prompts.input_ids.shape[1] + config.max_tokens
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what loading took is no part of it
    moments = [] if config.eval_only else [  # AdamW's, not there before step 1
        torch.zeros_like(p) for p in policy.parameters() for _ in range(2)]
    with memory_phase("sampling, in a dry run of the worst case", "--rollouts-at-once"), torch.no_grad():
        encode_figures(policy.base.eval(), prompts)
        which, prompt_of_row = (rows[:config.rollouts_at_once or None] // group_size).unique(return_inverse=True)
        cache, logits = program.prefill(policy, prompts, which)
        cache.reorder_cache(prompt_of_row)
        logits = logits[prompt_of_row]
        program.draw_tokens(logits, policy.forbidden_ids, 1.0, 1.0)
        kv_cache.extend(cache, config.max_tokens - 1)
        policy.base(input_ids=torch.zeros_like(prompt_of_row)[:, None], cache=cache, use_cache=True, logits_to_keep=1,
                    attention_mask=torch.ones(len(logits), 1, 1, width, dtype=torch.bool, device=device),
                    position_ids=torch.zeros(3, len(logits), 1, dtype=torch.long, device=device))
        del cache, logits
    if not config.eval_only:
        shape = len(rows), config.max_tokens
        zeros = torch.zeros(shape, device=device)
        rollouts = program.Rollouts(zeros.long(), zeros, zeros, torch.full_like(rows, config.max_tokens),
                                    torch.zeros_like(rows, dtype=torch.bool), config.temperature)
        longest, most = prompts.attention_mask.sum(-1).argmax(), max(1, config.tokens_per_micro_batch // width)
        micro = (longest * group_size).repeat(min(most, len(rows)))  # as many of the longest rows as come together
        program.accumulate_gradients(policy, prompts, rollouts, zeros, micro, config, zeros)
        for parameter in policy.parameters():
            parameter.grad = None
    del moments
    if device.type == "cuda":
        tqdm.write(f"dry run of the worst case: {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB at most")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
