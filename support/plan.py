"""The memory plan: what a setting takes on a card, before any weights are there.

The algorithm's own functions run on tensors without data (torch's FakeTensorMode), and every allocation is counted
while it lives. To be quick, the model has one decoder layer of each kind, and one and two rows are measured: memory is
affine in layers and rows. A test compares the result with the allocations of real runs.

What a CUDA card adds is assumed, not measured: RESERVE and MARGIN.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from support import branching, kv_cache, models
from support.errors import UserError
from support.hub import hub_folder
from support.padding import micro_batches
from vision_tokens import vision_token_count

GIB = 2**30
RESERVE, MARGIN = GIB, 0.03  # bytes, and a share, of a card: for CUDA itself, fragments, and what drives a screen
CARDS = 24, 16, 12  # GiB
PROMPT_TOKENS = 512  # assumed before the questions are known: 320 of the figure, the rest text
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # a weight, and its share of the doubly quantised scales


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside it while they live: `now`, and the highest, `peak`."""

    def __enter__(self):
        self.now = self.peak = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:  # most calls: autograd asks where each tensor is
            given, made = ({tensor.untyped_storage() for tensor in tree_leaves(tree) if torch.is_tensor(tensor)}
                           for tree in ((args, kwargs), out))
            for storage in made - given:  # a view takes nothing
                weakref.finalize(storage, self.free, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out

    def free(self, size):
        self.now -= size


def affine(measure):
    """`measure(n)` gives bytes by name -> f(name, n) on the line through its results for 1 and 2, made when asked."""
    measure = functools.cache(measure)
    return lambda name, n: measure(1)[name] + ((n - 1) * (measure(2)[name] - measure(1)[name]) if n > 1 else 0)


@dataclass(frozen=True)
class Algorithm:
    """What the plan and the dry run call of grpo.py: functions, and the class of a row."""

    encode_prompts: Callable
    prefill: Callable
    draw_tokens: Callable
    next_logits: Callable
    completion_logprobs: Callable
    accumulate_gradients: Callable
    completion: Callable


# ------------------------------------------------------------------------------------------- The model without data


class DequantisedLinear(torch.nn.Module):
    """Stand-in that allocates what a 4-bit layer does: its whole weight in the computing type, while it computes."""

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
    """Stand-in that allocates what flash-linear-attention's chunk_gated_delta_rule does, and computes nothing.

    Sizes read in fla/ops/gated_delta_rule/chunk.py of its version 0.6.0.
    """

    @staticmethod
    def forward(ctx, query, key, value, g, beta, start):
        rows, length, heads, width = value.shape
        normed = query.clone(), key.clone()
        o, *beside = (torch.empty_like(value) for _ in range(4))  # w, u, new values
        a, decay = value.new_empty(rows, length, heads, 64), g.float()
        beside.append(value.new_empty(rows, math.ceil(length / 64), heads, key.shape[-1], width))  # states
        ctx.save_for_backward(*normed, value, decay, beta, start, a)
        return o, value.new_empty(rows, heads, key.shape[-1], width, dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient, of_state):
        query, key, value, decay, beta, start, _ = ctx.saved_tensors
        rows, length, heads, width = value.shape
        dv, *beside = (torch.empty_like(value) for _ in range(6))  # w, u, new values, local dv, dw
        beside.append(value.new_empty(2, rows, math.ceil(length / 64), heads, key.shape[-1], width))  # states, theirs
        beside += [value.new_empty(rows, length, heads, key.shape[-1]) for _ in range(3)]  # dq, dk, dk2
        dstart = None if start is None else torch.empty_like(start)
        return query.clone(), key.clone(), dv, decay.clone(), beta.clone(), dstart


def fused_delta_rule(query, key, value, g, beta, initial_state=None, **options):
    return FusedDeltaRule.apply(query, key, value, g, beta, initial_state)


class Blank:
    """A prompt without data. A real one would look at its positions for the next."""

    figure = None

    def __init__(self, tokens):
        self.ids, self.positions = torch.zeros(tokens, dtype=torch.long), torch.zeros(3, tokens, dtype=torch.long)
        self.next_position = tokens


class Skeleton:
    """One decoder layer of each kind, with its adapter, on tensors without data.

    `kinds` and `counts`: the kinds of layers and how many of each the whole model has. `weights`: its bytes by group.
    """

    def __init__(self, whole, rank, nf4, dtype, checkpointing):
        all_kinds = list(getattr(whole.text_config, "layer_types", None)
                         or ["full_attention"] * whole.text_config.num_hidden_layers)
        self.kinds = list(dict.fromkeys(all_kinds))
        self.counts = [all_kinds.count(kind) for kind in self.kinds]
        config = copy.deepcopy(whole)
        config.text_config.num_hidden_layers, config.text_config.layer_types = len(self.kinds), self.kinds
        with torch.device("meta"):
            base = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype).requires_grad_(False)
            branching.take_branches(base)
            peft = models.add_lora(base, "", rank)
        self.model, self.text = base, base.model.language_model
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
            self.policy = SimpleNamespace(base=base, device=torch.device("cpu"),
                                          forbidden_ids=torch.zeros(5, dtype=torch.long))

    def weigh(self, nf4):
        """Sets the whole model's bytes: `weights` by group, and `adapter`."""
        self.weights = collections.Counter()
        for name, parameter in self.model.named_parameters():  # tied ones once
            layer = name.partition("language_model.layers.")[2].partition(".")[0]
            group = ("adapter" if parameter.requires_grad else "vision tower" if ".visual." in name else
                     "embedding and head" if "embed_tokens" in name or "lm_head" in name else
                     "language model, 4-bit" if nf4 and ".base_layer." in name else "language model, not 4-bit")
            self.weights[group] += (parameter.numel() * (self.counts[int(layer)] if layer else 1)
                                    * (NF4_BYTES if group.endswith(", 4-bit") else parameter.itemsize))
        self.adapter = self.weights.pop("adapter")

    def whole_model(self, each, kinds=None):
        """Bytes of a layer of each kind -> those of all layers, or of those of some kinds."""
        return sum(count * size for kind, count, size in zip(self.kinds, self.counts, each)
                   if kinds is None or kind in kinds)


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


def in_short_rows(rule, short=128):
    """The reference of the gated delta rule, in the learner on rows of `short` tokens in place of long ones.

    Its loop over chunks of 64 tokens is slow on tensors without data, and allocates the same for each.
    """
    def rule_in_short_rows(query, key, value, g, beta, initial_state=None, **options):
        rows, length = value.shape[:2]
        parts = length // short if length % short == 0 and torch.is_grad_enabled() else 1
        query, key, value, g, beta = (x.reshape(rows * parts, length // parts, *x.shape[2:]) for x in (
            query, key, value, g, beta))
        if initial_state is not None:
            initial_state = initial_state.repeat_interleave(parts, 0)
        out, state = rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)
        return out.reshape(rows, length, *out.shape[2:]), None if state is None else state[:rows]
    return rule_in_short_rows


@contextlib.contextmanager
def token_mixers(skeleton, fused):
    """Puts the torch reference of the gated delta rule, or the stand-in of the fused one, into the model's code.

    No kernel that is installed may run: on tensors without data it fails. Nor can causal_lower_right, which on CUDA
    allocates nothing.
    """
    module, mask = sys.modules[type(skeleton.text).__module__], branching.causal_lower_right
    found = {name: getattr(module, name) for name in models.KERNELS if hasattr(module, name)}
    for name, function in found.items():
        if chunked := name == "torch_chunk_gated_delta_rule":
            function = fused_delta_rule if fused else in_short_rows(inspect.unwrap(function))
        setattr(module, name, models.token_mixer(name, function, kernel=chunked))
    branching.causal_lower_right = lambda *size: None
    try:
        yield
    finally:
        branching.causal_lower_right = mask
        for name, function in found.items():
            setattr(module, name, function)


# ----------------------------------------------------------------------------------------------------- The phases


def longest_rows(algorithm, prompt, count, max_tokens):
    """`count` completions of full length beside one prompt, as the learner takes them."""
    zeros = torch.zeros(max_tokens)
    return [algorithm.completion(prompt, zeros.long(), zeros, zeros, zeros == 0, finished=False,
                                 reference_logprobs=zeros) for _ in range(count)]


def sampling_moments(algorithm, policy, prompts, max_tokens):
    """Goes through the moments of sampling that take most, and yields the cache after each.

    They are prefill, a draw, and a token for which the full buffers of the cache grow a last time.
    """
    cache, logits, visible, position = algorithm.prefill(policy, prompts, max_tokens)
    yield cache
    token, *_ = algorithm.draw_tokens(logits, policy.forbidden_ids, 1.0, 1.0, logits.new_zeros(len(logits)).float())
    yield cache
    earlier = max(0, max_tokens - 2) // kv_cache.BLOCK * kv_cache.BLOCK
    kv_cache.extend(cache, earlier)
    seen = visible.shape[1] - max_tokens + earlier + 1
    algorithm.next_logits(policy, cache, token, visible[:, :seen], position + earlier)
    yield cache


@torch.no_grad()
def sampling(algorithm, skeleton, fused, prompt, max_tokens, rows):
    """A completion for each of `rows` prompts -> bytes of the caches, and beside them the peaks of each moment."""
    with token_mixers(skeleton, fused), skeleton.mode, Allocations() as memory:
        skeleton.model.eval()
        sizes, beside = [], []
        for cache in sampling_moments(algorithm, skeleton.policy, [Blank(prompt) for _ in range(rows)], max_tokens):
            sizes.append(cache_bytes(cache))
            beside.append(memory.peak - sum(sizes[-1]))
            memory.peak = memory.now
    recurrent = skeleton.whole_model(sizes[-1], ["linear_attention"])
    return {"prompt cache": skeleton.whole_model(sizes[0]), "recurrent": recurrent,
            "attention": skeleton.whole_model(sizes[-1]) - recurrent,
            **dict(zip(("prefill", "logits", "layer"), beside))}


class FirstPass(Exception):
    """Ends prefill when its first forward pass begins."""


def prompts_at_once(algorithm, skeleton, prompt, most):
    """How many of `most` prompts prefill runs at a time."""
    def look(_, __, inputs):
        raise FirstPass(len(inputs["input_ids"]))

    hook = skeleton.model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with skeleton.mode:
            algorithm.prefill(skeleton.policy, [Blank(prompt) for _ in range(most)], 1)
    except FirstPass as first:
        return first.args[0]
    finally:
        hook.remove()


def cache_bytes(cache):
    """-> bytes of each layer."""
    def tensors(layer):
        yield from getattr(layer, "buffers", None) or (getattr(layer, name, None) for name in ("keys", "values"))
        for name in ("conv_states", "recurrent_states"):
            yield from getattr(layer, name, {}).values()

    return [sum(t.untyped_storage().nbytes() for t in tensors(layer) if t is not None) for layer in cache.layers]


def learning(algorithm, skeleton, fused, prompt, max_tokens, count):
    """`count` completions of a prompt forward and backward -> bytes that layers keep, and beside them the peaks of the
    output head, from the last norm until that has its gradient, and of a layer."""
    entered, peaks = [], []  # bytes at the start of each layer and of the last norm

    def take_peak(*_):
        peaks.append(memory.peak)
        memory.peak = memory.now

    def enter_head(_, inputs):
        take_peak()
        inputs[0].register_hook(take_peak)

    with token_mixers(skeleton, fused), skeleton.mode, Allocations() as memory:
        skeleton.model.train()
        hooks = [module.register_forward_pre_hook(lambda *_: entered.append(memory.now))
                 for module in (*skeleton.text.layers, skeleton.text.norm)]
        hooks.append(skeleton.text.norm.register_forward_pre_hook(enter_head))
        rows = longest_rows(algorithm, Blank(prompt), count, max_tokens)
        logprobs = algorithm.completion_logprobs(skeleton.policy, rows, 1.0)
        kept = [after - before for before, after in itertools.pairwise(entered)]
        logprobs.sum().backward()
        take_peak()
        for hook in hooks:
            hook.remove()
    _, head, layers = (peak - sum(kept) for peak in peaks)
    return {"kept": skeleton.whole_model(kept), "head": head, "layers": layers}


def room_of(card):
    """Bytes of a card that tensors of ours may take."""
    return card * (1 - MARGIN) - RESERVE


class Plan:
    """The bytes of each phase as functions of the rows at once, for one path of the gated delta rule."""

    def __init__(self, algorithm, skeleton, config, prompt, fused=False):
        """`prompt`: tokens of the longest prompt; `fused`: with flash-linear-attention."""
        self.algorithm, self.skeleton, self.config, self.prompt, self.fused = algorithm, skeleton, config, prompt, fused
        self.weights, self.adapter = dict(skeleton.weights), skeleton.adapter
        self.optimizer = 0 if config.eval_only else 2 * self.adapter
        parts = algorithm, skeleton, fused, prompt, config.max_tokens
        self.learned, self.sampled = (affine(functools.partial(phase, *parts)) for phase in (learning, sampling))
        self.prefill_at_once = prompts_at_once(algorithm, skeleton, prompt, self.most_rows_asked)

    @property
    def most_rows_asked(self):
        return max(self.config.batch_size * self.config.group_size, self.config.eval_batch_size)

    @property
    def fixed(self):
        """What is there in every phase."""
        return sum(self.weights.values()) + self.adapter + self.optimizer

    def prefill(self, prompts):
        return self.sampled("prefill", min(prompts, self.prefill_at_once)) + self.sampled("prompt cache", prompts)

    def decoding(self, rows):
        return (self.sampled("attention", rows) + self.sampled("recurrent", rows)
                + max(self.sampled("logits", rows), self.sampled("layer", rows)))

    def sampling_peak(self, rows, group_size):
        return self.fixed + max(self.prefill(math.ceil(rows / group_size)), self.decoding(rows))

    def completions_in(self, tokens):
        """The most completions of full length that the learner takes at once with this budget."""
        rows = longest_rows(self.algorithm, Blank(self.prompt), self.config.group_size, self.config.max_tokens)
        return max(map(len, micro_batches(rows, tokens)))

    def learning_peak(self, tokens):
        count = self.completions_in(tokens)
        return (self.fixed + self.adapter + self.learned("kept", count)  # adapter: its gradient
                + max(self.learned("head", count), self.learned("layers", count)))

    def most_rows(self, rows, room):
        """The most rows up to `rows` that can be drawn at once in `room` bytes; at least 1."""
        fitting = (n for n in range(rows, 1, -1) if self.sampling_peak(n, 1) <= room)
        return next(fitting, 1)

    def most_tokens(self, room):
        """The micro-batch for the most completions of one group that `room` bytes hold, in tokens; at least for one."""
        budgets = [self.prompt + n * self.config.max_tokens for n in range(self.config.group_size, 0, -1)]
        return next((tokens for tokens in budgets if self.learning_peak(tokens) <= room), budgets[-1])

    def choose(self, card):
        """-> (the config with what it leaves open set for a card of `card` bytes, the peak of each phase)."""
        config, room = self.config, room_of(card)
        at_once = config.rollouts_at_once or self.most_rows(self.most_rows_asked, room)
        tokens = config.tokens_per_micro_batch or (0 if config.eval_only else self.most_tokens(room))
        peaks = {} if config.eval_only else {
            "sampling": self.sampling_peak(min(config.batch_size * config.group_size, at_once), config.group_size),
            "learning": self.learning_peak(tokens)}
        if config.evaluate:
            peaks["evaluation"] = self.sampling_peak(min(config.eval_batch_size, at_once), 1)
        return dataclasses.replace(config, rollouts_at_once=at_once, tokens_per_micro_batch=tokens), peaks

    def one_row(self):
        """The peak with one completion at a time."""
        return max(self.sampling_peak(1, 1), 0 if self.config.eval_only else self.learning_peak(1))

    def limited(self, max_tokens):
        """The plan for completions of at most `max_tokens` tokens."""
        config = dataclasses.replace(self.config, max_tokens=max_tokens)
        return Plan(self.algorithm, self.skeleton, config, self.prompt, self.fused)

    def shorter(self, room):
        """The flag for the most tokens, in steps of 64, with which one completion at a time fits into `room` bytes."""
        tokens, peak, least = self.config.max_tokens, self.one_row(), self.limited(64).one_row()
        while peak > room >= least and tokens > 64:  # peaks are nearly affine in tokens
            tokens = int(64 + (tokens - 64) * (room - least) / (peak - least)) // 64 * 64
            peak = self.limited(tokens).one_row()
        return f"--max-tokens {tokens}" if peak <= room else "a smaller --base-model"

    def advice(self, card):
        """The flag that lowers the highest peak most, or "" where everything fits."""
        chosen, peaks = self.choose(card)
        room, phase = room_of(card), max(peaks, key=peaks.get)
        if peaks[phase] <= room:
            return ""
        if self.fixed > room:
            return "a smaller --base-model" if chosen.quantization != "none" else "--quantization nf4"
        if phase == "learning" and chosen.activation_checkpointing == "off":
            return "--activation-checkpointing on"
        if phase == "learning" and self.completions_in(chosen.tokens_per_micro_batch) > 1:
            return f"--tokens-per-micro-batch {self.most_tokens(room)}"
        if phase != "learning" and (rows := self.most_rows(chosen.rollouts_at_once, room)) > 1:
            return f"--rollouts-at-once {rows}"
        return self.shorter(room)


def make_plans(algorithm, config, whole, prompt=PROMPT_TOKENS, fused=(False, True)):
    """-> [Plan], without and with flash-linear-attention, which is nothing to a model without gated delta rule.

    `whole` is the configuration of the model.
    """
    device_type = "cpu" if config.device == "cpu" else "cuda"
    dtype, nf4 = models.precision(config.quantization, device_type)
    skeleton = Skeleton(whole, config.lora_rank, nf4, dtype,
                        models.checkpoints_activations(config.activation_checkpointing, device_type))
    if name := getattr(config, "teacher_model", ""):
        teacher = Skeleton(model_config(name)[0], config.lora_rank, nf4, dtype, False)
        skeleton.weights["teacher"] = sum(teacher.weights.values())
    fused = fused if "linear_attention" in skeleton.kinds else (False,)
    return [Plan(algorithm, skeleton, config, prompt, way) for way in fused]


# ---------------------------------------------------------------------------------------------------- What is shown


PATHS = {False: "torch reference", True: "flash-linear-attention"}


def plan_text(algorithm, config):
    """What `--plan` prints. Raises UserError for a run on the CPU."""
    if config.device == "cpu":
        raise UserError("--plan is about a GPU's memory: give --device cuda, whether there is one here or not")
    models.quiet_libraries(torch.device("cpu"))
    if config.eval_only:  # a question has one completion there
        config = dataclasses.replace(config, batch_size=config.eval_batch_size, group_size=1)
    whole, source = model_config(config.base_model)
    plans = make_plans(algorithm, config, whole)
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
    sizes = {f"base: {name}": size for name, size in plan.weights.items()} | {
        "adapter": plan.adapter, "AdamW's two moments": plan.optimizer,
        "sampling: keys and values": plan.sampled("attention", rows),
        "sampling: recurrent states": plan.sampled("recurrent", rows),
        "sampling: logits of a token": plan.sampled("logits", rows),
        "prefill, before that": plan.prefill(math.ceil(rows / config.group_size))}
    text = {"completions drawn at once": str(rows)}
    if not config.eval_only:
        count = plan.completions_in(config.tokens_per_micro_batch)
        text["tokens (completions) in a micro-batch"] = f"{config.tokens_per_micro_batch:,} ({count})"
        sizes |= {"learning: gradient": plan.adapter,
                  "learning: kept for the backward pass": plan.learned("kept", count),
                  "learning: the largest layer": plan.learned("layers", count),
                  "learning: a chunk of logits": plan.learned("head", count)}
    sizes |= {f"peak of {phase}": peak for phase, peak in peaks.items()}
    total = max(peaks.values()) + RESERVE
    return text | {name: f"{size / GIB:.2f}" for name, size in sizes.items()} | {
        f"total with {RESERVE / GIB:.0f} for CUDA itself": f"{total / GIB:.2f} of {card / GIB:.0f}"}


def card_line(plan, card):
    """Whether it fits a card, and with which flags."""
    config, peaks = plan.choose(card)
    if advice := plan.advice(card):
        return f"{card / GIB:5.0f} GiB  does not fit; what helps most: {advice}"
    return (f"{card / GIB:5.0f} GiB  fits: {(max(peaks.values()) + RESERVE) / GIB:.1f} GiB; a run on it chooses "
            f"{chosen_flags(config)}")


def chosen_flags(config):
    tokens = f" --tokens-per-micro-batch {config.tokens_per_micro_batch}"
    return f"--rollouts-at-once {config.rollouts_at_once}" + tokens * (not config.eval_only)


def card_bytes(device=None):
    """Memory of the CUDA card; 24 GiB where there is none."""
    return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else CARDS[0] * GIB


def model_config(name):
    """-> (the model's configuration, where it is from): a folder, the hub, or for the default model a table here."""
    try:
        folder, _ = hub_folder(name, "model", ["config.json"])
        whole = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (UserError, OSError, ValueError) as error:
        if name != DEFAULT_MODEL:
            raise UserError(f"the memory plan needs config.json of {name}: {error}") from error
        return transformers.Qwen3_5Config(**copy.deepcopy(QWEN3_5_4B)), "sizes built in, the hub is out of reach"
    if whole.model_type not in models.SUPPORTED_MODELS:
        raise UserError(f"{name} is a {whole.model_type} model; supported are {', '.join(models.SUPPORTED_MODELS)}")
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


def fit_memory(algorithm, policy, task, questions, config):
    """Says what will be taken, tries the worst case once -> the config with what it leaves to the plan set.

    `questions` are those that will be asked. Raises UserError where memory runs out.
    """
    count, device, asked = config.batch_size, policy.device, config
    if config.eval_only:  # a question has one completion there
        count, asked = min(config.eval_batch_size, len(questions)), dataclasses.replace(config, group_size=1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what loading took is no part of it
    with memory_phase("the vision tower", "--max-image-tokens"):
        prompts = algorithm.encode_prompts(policy, longest_questions(policy, task, questions, count, config), task,
                                           config.max_image_tokens)
    plan, = make_plans(algorithm, asked, policy.base.config, max(len(prompt.ids) for prompt in prompts),
                       (models.fused_kernels(policy.base, config.fused_kernels),))
    card = card_bytes(device)
    chosen, peaks = plan.choose(card)
    tqdm.write(f"memory plan: {chosen_flags(chosen)}, GiB of {card / GIB:.1f}: "
               + ", ".join(f"{phase} {peak / GIB:.1f}" for phase, peak in peaks.items()))
    try:
        dry_run(algorithm, policy, prompts, chosen)
    except UserError as error:
        raise UserError(f"{error}; by the memory plan, what helps most is "
                        f"{plan.advice(card) or 'a little less of that'}") from error
    return dataclasses.replace(config, rollouts_at_once=chosen.rollouts_at_once,
                               tokens_per_micro_batch=chosen.tokens_per_micro_batch)


def longest_questions(policy, task, questions, count, config):
    """The `count` questions with the longest prompts: characters of the text, tokens of the figure. Few ones repeat."""
    lengths = [len(task.prompt(question)) + (0 if question.image is None else vision_token_count(
        policy.image_processor, question.image, config.max_image_tokens)) for question in questions]
    order = sorted(range(len(questions)), key=lengths.__getitem__, reverse=True)
    return [questions[i] for i in itertools.islice(itertools.cycle(order), count)]


def dry_run(algorithm, policy, prompts, config):
    """The largest wave with its cache full, and the largest micro-batch, once: what cannot fit stops before step 1."""
    moments = [] if config.eval_only else [  # AdamW's, not there before step 1
        torch.zeros_like(p) for p in policy.parameters() for _ in range(2)]
    with memory_phase("sampling, in a dry run of the worst case", "--rollouts-at-once"), torch.no_grad():
        policy.base.eval()
        wave = [prompt for prompt in prompts for _ in range(config.group_size)][:config.rollouts_at_once]
        for _ in sampling_moments(algorithm, policy, wave, config.max_tokens):
            pass
    with memory_phase("learning, in a dry run of the worst case", "--tokens-per-micro-batch"):
        if not config.eval_only:
            longest = max(prompts, key=lambda prompt: len(prompt.ids))
            rows = longest_rows(algorithm, longest, config.group_size, config.max_tokens)
            algorithm.accumulate_gradients(policy, micro_batches(rows, config.tokens_per_micro_batch)[:1], config)
            for parameter in policy.parameters():
                parameter.grad = None
    del moments
    if policy.device.type == "cuda":
        tqdm.write(f"dry run of the worst case: {torch.cuda.max_memory_allocated(policy.device) / GIB:.1f} GiB at most")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(policy.device)
