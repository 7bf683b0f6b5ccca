"""The memory plan: what a setting takes on a card, before any weights are there.

The model's own code runs forward and backward on tensors without data (torch's FakeTensorMode), and every allocation
is counted while it lives. To be quick, the model has one decoder layer of each kind and few rows; a layer more, or a
row more, adds what the two differ by. A test compares the result with the allocations of real runs.

What a CUDA card adds is assumed, not measured: RESERVE for the context, libraries and fragmentation.
"""

import contextlib
import copy
import dataclasses
import inspect
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

import kv_cache
from hub import UserError, hub_folder
from loading import SUPPORTED_MODELS, add_lora, checkpoints_activations, precision, quiet_libraries

GIB = 2**30
RESERVE = GIB  # of a card, for what is not a tensor of ours
CARDS = 24, 16, 12  # GiB
PROMPT_TOKENS = 512  # assumed before the questions are known: 320 of the figure, the rest text
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # a weight, and its share of the doubly quantised scales
MOST_TOKENS_PER_MICRO_BATCH = 16384  # a larger one is no faster


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
    def through(cls, one, two, scale=1):
        return cls(2 * one - two, (two - one) * scale)

    def __call__(self, n):
        return max(0.0, self.base + self.each * n)


# ------------------------------------------------------------------------------------------- The model without data


class DequantisedLinear(torch.nn.Module):
    """Takes what a 4-bit layer takes: its whole weight in the computing type, while it computes."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.nn.Parameter(linear.weight[:, :1].contiguous(), requires_grad=False)  # only to be asked

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
        groups = dict.fromkeys(("vision tower", "embedding and head", "language model, 4-bit", "language model"), 0)
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
                groups["language model"] += size * parameter.itemsize
        self.weights = {name: size for name, size in groups.items() if size}

    def forward(self, rows, width, cached=0, **inputs):
        """The language model on `rows` rows of `width` new tokens behind `cached` old ones -> last hidden states."""
        mask = torch.ones(rows, 1, width, cached + width, dtype=torch.bool)
        if "linear_attention" in self.kinds:
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
    """Puts the torch reference of the gated delta rule, or the sizes of the fused one, into the model's code."""
    module = sys.modules[type(skeleton.text).__module__]
    name = "torch_chunk_gated_delta_rule"
    if not hasattr(module, name):
        yield
        return
    installed = getattr(module, name)
    setattr(module, name, fused_delta_rule if fused else inspect.unwrap(installed))
    try:
        yield
    finally:
        setattr(module, name, installed)


# ----------------------------------------------------------------------------------------------------- The phases


def learning(skeleton, rows, prompt, completion, token_logprobs, logit_chunk):
    """A micro-batch of `rows` completions -> bytes: kept for the backward pass, and beside it the head, the layers."""
    entered, heads = [], []  # bytes at the start of each layer and of the last norm; the head's peak
    with skeleton.mode, Allocations() as memory:
        hooks = [module.register_forward_pre_hook(lambda *_: entered.append(memory.now)) for module in
                 (*skeleton.text.layers, skeleton.text.norm)]
        skeleton.model.train()
        hidden = skeleton.forward(rows, prompt + completion, use_cache=False)[:, -completion - 1:-1]
        kept = [after - before for before, after in itertools.pairwise(entered)]
        memory.peak = memory.now

        def head_done(_):
            heads.append(memory.peak - sum(kept))
            memory.peak = memory.now

        hidden.register_hook(head_done)
        states = hidden.reshape(-1, hidden.shape[-1])  # all tokens count in the worst case
        chunks = zip(states.split(logit_chunk), torch.zeros(len(states), dtype=torch.long).split(logit_chunk))
        logprobs = torch.cat([checkpoint(token_logprobs, skeleton.model.get_output_embeddings(), some, targets,
                                         torch.zeros(4, dtype=torch.long), 1.0, use_reentrant=False)
                              for some, targets in chunks])
        logprobs.sum().backward()
        for hook in hooks:
            hook.remove()
    return {"kept": skeleton.whole_model(kept), "head": heads[0], "layers": memory.peak - sum(kept)}


@torch.no_grad()
def sampling(skeleton, rows, prompt, completion, draw_tokens):
    """`rows` prompts, one completion each -> bytes: prefill beside its cache, caches, a decoded token beside them."""
    from transformers import DynamicCache

    def cache_bytes(layer):
        tensors = getattr(layer, "buffers", None) or [getattr(layer, name, None) for name in ("keys", "values")]
        tensors = [*tensors, *getattr(layer, "conv_states", {}).values(),
                   *getattr(layer, "recurrent_states", {}).values()]
        return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)

    head = skeleton.model.eval().get_output_embeddings()
    with skeleton.mode, Allocations() as memory:
        cache = DynamicCache(config=skeleton.model.config)
        logits = head(skeleton.forward(rows, prompt, cache=cache, use_cache=True)[:, -1:])[:, -1]
        prefilled = [cache_bytes(layer) for layer in cache.layers]
        prefill = memory.peak - sum(prefilled)
        cache = kv_cache.join_caches([cache])
        grown = kv_cache.BLOCK * ((completion - 1) // kv_cache.BLOCK)  # the buffers grow for the next token
        for layer in cache.layers if grown else []:
            if isinstance(layer, kv_cache.GrowingLayer):
                layer.update(*(torch.empty(rows, layer.keys.shape[1], grown, layer.keys.shape[3],
                                           dtype=layer.keys.dtype) for _ in range(2)))
        grown_bytes = [cache_bytes(layer) for layer in cache.layers]
        memory.peak, before = memory.now, memory.now - sum(grown_bytes)
        draw_tokens(logits, torch.zeros(4, dtype=torch.long), 1.0, 1.0)
        drawn, memory.peak = memory.peak, memory.now
        head(skeleton.forward(rows, 1, prompt + grown, cache=cache, use_cache=True))
        full = [cache_bytes(layer) for layer in cache.layers]
    recurrent = [size if kind == "linear_attention" else 0 for kind, size in zip(skeleton.kinds, full)]
    return {"prefill": prefill, "prompt cache": skeleton.whole_model(prefilled),
            "recurrent": skeleton.whole_model(recurrent), "attention": skeleton.whole_model(full) -
            skeleton.whole_model(recurrent), "logits": drawn - before - sum(grown_bytes),
            "layer": memory.peak - before - sum(full)}


class Plan:
    """The bytes of each phase as functions of the rows at once, for one path of the gated delta rule."""

    def __init__(self, skeleton, config, prompt, functions, prefill_tokens, fused=False):
        """`functions`: grpo's (token_logprobs, draw_tokens, logit chunk). `prompt`: tokens of the longest prompt."""
        token_logprobs, draw_tokens, logit_chunk = functions
        self.config, self.prompt, self.width = config, prompt, prompt + config.max_tokens
        # Rows of 384 tokens stand for longer ones, which the reference's loop over chunks would make slow.
        scale = max(1, self.width / 384)
        widths = math.ceil(prompt / scale), math.ceil(config.max_tokens / scale)
        with delta_rule(skeleton, fused):
            learned = [learning(skeleton, rows, *widths, token_logprobs, logit_chunk) for rows in (1, 2)]
            sampled = [sampling(skeleton, rows, prompt, config.max_tokens, draw_tokens) for rows in (1, 2)]
        self.learned = {name: Affine.through(*(rows[name] for rows in learned), scale) for name in learned[0]}
        self.sampled = {name: Affine.through(*(rows[name] for rows in sampled)) for name in sampled[0]}
        self.weights = dict(skeleton.weights)
        self.adapter, self.optimizer = 4 * skeleton.adapter_size, 8 * skeleton.adapter_size
        self.prefill_at_once = max(1, prefill_tokens // prompt)

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

    def learning_peak(self, tokens):
        rows = self.learning_rows(tokens)
        return (self.fixed + self.adapter + self.learned["kept"](rows)  # adapter: its gradient
                + max(self.learned["head"](rows), self.learned["layers"](rows)))

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
        config, room = self.config, card - RESERVE
        rows = config.batch_size * config.group_size
        at_once = config.rollouts_at_once or self.most_rows(max(rows, config.eval_batch_size), 1, room)
        tokens = config.tokens_per_micro_batch or self.most_tokens(room)
        peaks = {"sampling": self.sampling_peak(min(rows, at_once), config.group_size),
                 "learning": self.learning_peak(tokens)}
        if config.evaluate:
            peaks["evaluation"] = self.sampling_peak(min(config.eval_batch_size, at_once), 1)
        return dataclasses.replace(config, rollouts_at_once=at_once, tokens_per_micro_batch=tokens), peaks

    def advice(self, card):
        """The flag that lowers the highest peak most, or "" where everything fits."""
        chosen, peaks = self.choose(card)
        room, phase = card - RESERVE, max(peaks, key=peaks.get)
        shorter = f"--max-tokens {self.config.max_tokens // 2}"
        if peaks[phase] <= room:
            return ""
        if self.fixed > room:
            return "a smaller --base-model" if chosen.quantization != "none" else "--quantization nf4"
        if phase == "learning":
            if chosen.activation_checkpointing == "off":
                return "--activation-checkpointing on"
            return shorter if self.learning_rows(chosen.tokens_per_micro_batch) == 1 else (
                f"--tokens-per-micro-batch {self.most_tokens(room)}")
        fitting = self.most_rows(chosen.rollouts_at_once, 1, room)
        return shorter if fitting == 1 else f"--rollouts-at-once {fitting}"


def make_plans(config, whole, functions, prefill_tokens, prompt=PROMPT_TOKENS):
    """-> {path of the gated delta rule: Plan}; one plan, "", for a model without such layers."""
    dtype, nf4 = precision(config.quantization, "cpu" if config.device == "cpu" else "cuda")
    checkpointing = checkpoints_activations(config.activation_checkpointing, config.device)
    skeleton = Skeleton(whole, config.lora_rank, nf4, dtype, checkpointing)
    paths = {"torch reference": False, "flash-linear-attention": True} if "linear_attention" in skeleton.kinds else {
        "": False}
    return {path: Plan(skeleton, config, prompt, functions, prefill_tokens, fused) for path, fused in paths.items()}


# ---------------------------------------------------------------------------------------------------- What is shown


def plan_text(config, functions, prefill_tokens):
    """What `--plan` prints."""
    quiet_libraries(torch.device("cpu"))
    whole, source = model_config(config)
    plans = make_plans(config, whole, functions, prefill_tokens)
    card, prompt = card_bytes(), next(iter(plans.values())).prompt
    columns = [plan_rows(plan, card) for plan in plans.values()]
    lines = [f"memory plan of {config.base_model} ({source}): {config.batch_size} questions x {config.group_size} "
             "completions,", f"prompts of {prompt} tokens, at most {config.max_tokens:,} new ones. GiB, by the sizes "
             "of all tensors, not measured on a card.", "",
             f"{'':42}" + "".join(f"{path:>25}" for path in plans)]
    for row, name in enumerate(columns[0]):
        lines.append(f"{name:42}" + "".join(f"{list(column.values())[row]:>25}" for column in columns))
    for path, plan in plans.items():
        lines += ["", f"cards{', ' + path if path else ''}:"]
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
        "learning: a chunk of logits": plan.learned["head"](learned)}
    sizes |= {f"peak of {phase}": peak for phase, peak in peaks.items()}
    text = {"completions drawn at once": rows, "tokens (completions) in a micro-batch":
            f"{config.tokens_per_micro_batch:,} ({learned})"} | {
        name: f"{size / GIB:.2f}" for name, size in sizes.items()}
    total = max(peaks.values()) + RESERVE
    return text | {f"total, {RESERVE / GIB:.0f} for CUDA itself among it": f"{total / GIB:.2f} of {card / GIB:.0f}"}


def card_line(plan, card):
    """Whether it fits a card, and with which flags."""
    config, peaks = plan.choose(card)
    if advice := plan.advice(card):
        return f"{card / GIB:5.0f} GiB  does not fit; what helps most: {advice}"
    return (f"{card / GIB:5.0f} GiB  fits, with --rollouts-at-once {config.rollouts_at_once} --tokens-per-micro-batch "
            f"{config.tokens_per_micro_batch}: {(max(peaks.values()) + RESERVE) / GIB:.1f} GiB")


def card_bytes():
    """Memory of the CUDA card; 24 GiB where there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else CARDS[0] * GIB


def model_config(config):
    """-> (the model's configuration, where it is from): a folder, the hub, or for the default model a table here."""
    from transformers import AutoConfig, Qwen3_5Config

    try:
        folder, _ = hub_folder(config.base_model, "model", config.model_revision, ["config.json"])
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (UserError, OSError, ValueError) as error:
        if config.base_model != DEFAULT_MODEL:
            raise UserError(f"--plan needs config.json of {config.base_model}: {error}") from error
        return Qwen3_5Config(**copy.deepcopy(QWEN3_5_4B)), "sizes built in, the hub is out of reach"
    if whole.model_type not in SUPPORTED_MODELS:
        raise UserError(f"{config.base_model} is a {whole.model_type} model; supported are {SUPPORTED_MODELS}")
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
    """Turns an out-of-memory error into a UserError that names the phase and the flag."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory in {name}: lower {flag} (--plan shows what each phase takes)") from error
