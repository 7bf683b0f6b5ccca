"""Vision GRPO on one GPU: teaches a vision-language model geometry by reinforcement learning.

    python grpo.py                       # Qwen3.5-4B on GeoQA, one 24 GB card
    python demo.py                       # the same code on a tiny model and drawn figures, any machine

Each step draws G completions for each of B questions, rewards a right final \\boxed{letter} with 1, and makes the
completions that beat their group's mean more likely (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1).

Where this differs from the paper, and why; the numbers stand again at the lines that do it, here and in losses.py:
 1. The advantage is reward - mean. The paper also divides by the group's standard deviation (`--advantage grpo_std`),
    which over-weights questions that are almost always or almost never solved; the article (README) does not.
 2. By default a batch gets one update, so there is nothing to clip: the loss is -ratio * advantage with ratio =
    exp(logp - old_logp), 1 up to rounding; old_logp is what the sampler gave the token when it drew it. For clipping:
    `--loss-fn ppo --updates-per-rollout 2`.
 3. No KL term to a reference model, as in the article (`--kl-coef` adds one).
 4. The mean runs over the tokens of all rows that train in an optimiser step. The paper takes it within each row first,
    which makes a token of a long wrong answer count less than one of a short wrong answer.
 5. Groups whose rewards are all equal have no signal: they are skipped and counted, and are in no denominator.
 6. The policy is a 4-bit base with a LoRA adapter, and image tokens cannot be drawn: sampler and learner both take the
    softmax over the remaining vocabulary.
"""

if __name__ == "__main__":  # before torch, so that Ctrl-C prints no traceback while libraries load
    from support.interrupts import quiet_while_loading

    quiet_while_loading()

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import DynamicCache

from geoqa import Question, format_question, load_geoqa
from losses import LOSS_FNS, LOSS_REDUCTIONS, clip_metrics, micro_batch_loss, ratio_metrics, reduction_of
from report import write_report
from reward import Reading, overlong_penalty, read_choice, reward_completion
from support.branching import Branches
from support.checkpoints import NonFinite
from support.command_line import checked_config, reward_weights, run_command_line
from support.cost import Meter, StepClock
from support.kv_cache import join_caches
from support.metrics import batch_metrics, update_metrics
from support.models import (add_lora, check_context, checkpoints_activations, image_ids, kernels_line, load_base,
                            pick_device, stop_ids)
from support.order import Order, require_questions, uniform_numbers
from support.padding import left_padded, micro_batches, rectangle
from support.plan import Algorithm, fit_memory, memory_phase, plan_text
from support.run_settings import RunSettings, flag
from support.rundir import RunDir, free_run_path
from vision_tokens import encode, encode_figures, figure_inputs, rotary_positions

LOGIT_CHUNK = 256  # tokens whose logits exist at once in the learner: 0.25 GB in float32, and a few copies of it
PREFILL_TOKENS = 4096  # prompt tokens, padding included, that go through the model at once in the sampler
CHECK_EVERY = {"cuda": 16, "cpu": 1}  # tokens between two checks for finished rows; each makes the CPU wait for the GPU
MOST_CANDIDATES = 4  # times --batch-size: the most questions that dynamic sampling draws in a step


# ---------------------------------------------------------------------------------------------------------- Config
@dataclass
class Config(RunSettings):
    base_model: str = flag("Qwen/Qwen3.5-4B", "policy: hub id, id@revision or folder", section="model")
    adapter: str = flag("", "folder of a LoRA adapter to start from")
    lora_rank: int = flag(32, "rank of the adapter; alpha equals it", at_least=1)
    quantization: Literal["auto", "nf4", "none"] = flag("auto", "of the base; auto: nf4 on CUDA, none on a CPU")

    dataset: str = flag("hz2475/geoQA", "questions: hub id, id@revision or folder", section="data")
    max_samples: int = flag(0, "train on the first N shuffled questions; 0: on all", at_least=0)
    max_image_tokens: int = flag(1024, "downsize figures above N visual tokens; 0: never", at_least=0)

    steps: int = flag(100, "training steps, one batch of questions each", section="algorithm", at_least=1)
    batch_size: int = flag(8, "questions a step", at_least=1)
    group_size: int = flag(8, "completions a question", at_least=2)
    max_tokens: int = flag(1024, "longest completion in tokens, in training and evaluation", at_least=1)
    temperature: float = flag(1.0, "softmax temperature of the rollouts", above=0)
    seed: int = flag(42, "of question order, adapter and draws; never of the test set", at_least=0)
    learning_rate: float = flag(4e-5, "of AdamW, constant", at_least=0)
    max_grad_norm: float = flag(1.0, "scale gradients down to this norm; 0: never", at_least=0)
    algorithm: Literal["grpo", "dapo"] = flag("grpo", "dapo sets those DAPO flags that are at their default")
    sampler: str = flag("loop", "loop: ours; generate: transformers', slower", choices=lambda: SAMPLERS)
    reward: str = flag("right", "names and weights, e.g. right:1,brevity:0.2", choices=lambda: GEOQA.rewards)
    advantage: str = flag("grpo", "reward - mean; grpo_std also divides by std", choices=lambda: ADVANTAGES)
    loss_fn: str = flag("importance_sampling", "loss of each token", choices=LOSS_FNS)
    clip_low: float | None = flag(None, "`low` in the loss's formula; unset: the loss's own", at_least=0)
    clip_high: float | None = flag(None, "`high` in the loss's formula; unset: the loss's own", at_least=0)
    loss_reduction: Literal["auto", "token", "sequence", "constant"] = flag("auto", "auto: the loss's own, else token")
    updates_per_rollout: int = flag(1, "passes over one batch of rollouts", at_least=1)
    minibatches: int = flag(1, "at most so many parts of a pass, an optimiser step each", at_least=1)
    kl_coef: float = flag(0.0, "weight of the KL term to the base; above 0 no group is skipped", at_least=0)
    mask_truncated: bool = flag(False, "leave completions that hit the limit out of training")
    overlong_penalty: bool = flag(False, "lower rewards near the limit: over the last quarter of --max-tokens, to -1")
    dynamic_sampling: bool = flag(False, "draw questions until --batch-size groups have unequal rewards")

    evaluate: bool = flag(True, "evaluate before and after training", section="evaluation")
    eval_split: Literal["test", "dev"] = flag("test", "split of the evaluation questions")
    test_size: int = flag(100, "questions of the test split, always the same; 0: all; dev is always whole", at_least=0)
    eval_temperature: float = flag(0.0, "softmax temperature of evaluation; 0: greedy", at_least=0)
    top_p: float = flag(1.0, "nucleus, with --eval-only; training needs 1", above=0, at_most=1)


# ------------------------------------------------------------------------------------------------------------ Task
@dataclass(frozen=True)
class Task:
    """What is asked, and how answers are judged: all of the program that is about geometry."""

    load: Callable  # (config, split) -> a sequence of questions that has .revision and .notes
    prompt: Callable  # (question, with_solution=False) -> the user turn's text; the figure, if there is one, follows it
    read: Callable  # (text, question) -> Reading: for rewards, the format rate, evaluation and the page
    rewards: dict  # name -> f(completion, question) -> number; it has .text .reading .tokens .finished. Add yours here


GEOQA = Task(
    lambda config, split: load_geoqa(config.dataset, split, config.test_size, config.seed,
                                     config.max_samples if split == "train" else 0),
    format_question, read_choice, {"right": lambda completion, question: completion.reading.right})


# ---------------------------------------------------------------------------------------------------------- Policy
@dataclass
class Policy:
    """A frozen base with a trainable LoRA adapter, and what turns text and figures into its input."""

    model: object  # peft.PeftModel; a teacher is a bare transformers model
    tokenizer: object
    image_processor: object
    revision: str = "local"

    def __post_init__(self):
        self.stop_ids = stop_ids(self.base, self.tokenizer)  # any of them ends a completion
        self.forbidden_ids = image_ids(self.base)  # never drawn: probability 0 in sampler and learner (6)

    @property
    def base(self):
        """The transformers model; PEFT has put the adapter's layers into it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def device(self):
        return self.base.device

    def parameters(self):
        return [p for p in self.model.parameters() if p.requires_grad]


def load_policy(config):
    """Config -> Policy. By default an NF4 base in bf16 on CUDA, a float32 base on a CPU; a float32 adapter on both (6).

    Raises UserError where there is no GPU, no such model, or a model of another kind than models.SUPPORTED_MODELS.
    """
    device = pick_device(config.device)
    policy = Policy(*load_base(config.base_model, device, config.quantization, config.fused_kernels))
    if checkpoints_activations(config.activation_checkpointing, policy.device.type):
        policy.base.activation_checkpointing_enable()
    torch.manual_seed(config.seed)  # the adapter's start
    policy.model = add_lora(policy.base, config.base_model, config.lora_rank, config.adapter)
    tqdm.write(kernels_line(policy.base, config.fused_kernels))
    return policy


# ------------------------------------------------------------------------------------------------------------ Rows
@dataclass(eq=False)
class Prompt:
    """A question as the model reads it, on the CPU. Compared by identity."""

    ids: torch.Tensor  # (P,)
    positions: torch.Tensor  # (3, P) rotary positions in time, height and width
    figure: object  # what the vision tower gave for it, on the policy's device; None where there is no figure
    question: Question
    note: str = ""  # says that its figure was downsized

    @property
    def next_position(self):
        """Position of a completion's first token: a figure advances the position by less than its token count."""
        return int(self.positions.max()) + 1


@dataclass(eq=False)
class Completion:
    """One answer to a prompt, on the CPU: a row. A group is a run of rows that share one Prompt."""

    prompt: Prompt
    tokens: torch.Tensor  # (T,), the stop token included
    logprobs: torch.Tensor  # (T,) float32, old_logp (2): of the full softmax at the sampler's temperature
    entropies: torch.Tensor  # (T,) float32, nats, of the same softmax
    trained: torch.Tensor  # (T,) bool, False on what the policy did not draw, such as a tool's answer
    finished: bool  # False where the limit cut it
    text: str = ""  # text and reading are set by `answer`, rewards by `draw_batch`, the advantage by `set_advantages`
    reading: Reading | None = None
    rewards: dict = field(default_factory=dict)  # name -> raw value
    reward: float = 0.0  # their weighted sum
    advantage: object = 0.0  # a number, or (T,) from a teacher
    reference_logprobs: torch.Tensor | None = None  # (T,) of the base policy, for the KL term

    @property
    def length(self):
        """Tokens that train."""
        return int(self.trained.sum())


def encode_prompts(policy, questions, task, max_image_tokens=1024, with_solution=False):
    """Questions -> [Prompt], each figure through the vision tower once. `with_solution` is for a teacher."""
    encoded = [encode(policy.tokenizer, policy.image_processor, task.prompt(question, with_solution), question.image,
                      max_image_tokens, f"question {question.id}") for question in questions]
    figures = encode_figures(policy.base.eval(), encoded)
    return [Prompt(torch.tensor(prompt.ids), rotary_positions(policy.base, prompt), figure, question, prompt.note)
            for prompt, figure, question in zip(encoded, figures, questions)]


# --------------------------------------------------------------------------------------------------------- Sampler
@memory_phase("sampling", "--rollouts-at-once")
@torch.no_grad()
def sample(policy, prompts, max_tokens, temperature=1.0, top_p=1.0, uniforms=None):
    """Draws a completion of at most `max_tokens` tokens for each of `prompts`, together -> [Completion].

    A Prompt that stands in the list G times is prefilled once. `uniforms` (n, max_tokens) in [0, 1) decide the draws;
    None: fresh ones. For evaluation: temperature 0 decodes greedily (logprobs are then those at 1); top_p < 1 draws
    from the nucleus, but reports logprobs of the full softmax. UserError where a row exceeds the model's context.
    """
    device, n = policy.device, len(prompts)
    cache, logits, visible, position = prefill(policy, prompts, max_tokens)
    uniforms = (torch.rand(n, max_tokens) if uniforms is None else uniforms).to(device)
    tokens = torch.zeros(n, max_tokens, dtype=torch.long, device=device)
    logprobs, entropies = torch.zeros(2, n, max_tokens, device=device)
    live, check_every = torch.arange(n, device=device), CHECK_EVERY[device.type]  # live: rows not yet finished
    width = visible.shape[1] - max_tokens
    with tqdm(total=max_tokens, desc="sampling", unit="token", leave=False, disable=None) as bar:
        for t in range(max_tokens):
            token, logprob, entropy = draw_tokens(logits, policy.forbidden_ids, temperature, top_p, uniforms[live, t])
            tokens[live, t], logprobs[live, t], entropies[live, t] = token, logprob, entropy
            bar.update()
            if t + 1 == max_tokens:
                break
            if (t + 1) % check_every == 0:
                stopped = torch.isin(tokens[live, t + 1 - check_every:t + 1], policy.stop_ids).any(1)
                keep = (~stopped).nonzero()[:, 0]
                if len(keep) == 0:
                    break
                if len(keep) < len(live):
                    cache.reorder_cache(keep)
                    live, token, visible, position = live[keep], token[keep], visible[keep], position[keep]
            logits = next_logits(policy, cache, token, visible[:, :width + t + 1], position + t)
    return cut_completions(policy, prompts, tokens, logprobs, entropies)


def prefill(policy, prompts, max_tokens):
    """Runs each distinct prompt through the model, a few at a time -> the cache of all rows (n), and for each row its
    first token's logits (n, V), the columns that it may see (n, P + max_tokens), its first token's position (n,).
    """
    base, distinct = policy.base.eval(), list(dict.fromkeys(prompts))
    ids, visible, positions = left_padded(distinct, policy.device)
    check_context(policy.base, ids.shape[1], max_tokens)
    parts, at_once = [], max(1, PREFILL_TOKENS // ids.shape[1])
    for i in range(0, len(distinct), at_once):
        few = slice(i, i + at_once)
        outputs = base(input_ids=ids[few], attention_mask=visible[few].long(), position_ids=positions[:, few],
                       cache=DynamicCache(config=base.config), use_cache=True, logits_to_keep=1,
                       **figure_inputs([prompt.figure for prompt in distinct[few]]))
        parts.append((outputs.cache, outputs.logits[:, -1]))
    cache, logits = join_caches([cache for cache, _ in parts]), torch.cat([logits for _, logits in parts])
    index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=policy.device)
    cache.reorder_cache(index)
    position = torch.tensor([prompt.next_position for prompt in prompts], device=policy.device)
    return cache, logits[index], F.pad(visible[index], (0, max_tokens), value=True), position


def next_logits(policy, cache, token, visible, position):
    """Puts `token` (n,) at `position` (n,) behind the cache -> logits (n, V). `visible` (n, tokens of the cache)."""
    # Positions are given: model.rope_deltas is state that goes stale when rows are expanded or dropped.
    # The mask has 4 dimensions: transformers inspects a 2-D mask on the host, a GPU sync for every token.
    return policy.base(input_ids=token[:, None], position_ids=position.expand(3, -1)[..., None], cache=cache,
                       attention_mask=visible[:, None, None], use_cache=True, logits_to_keep=1).logits[:, -1]


def cut_completions(policy, prompts, tokens, logprobs, entropies):
    """Three (n, T) tensors of what was drawn -> [Completion], each cut behind its first stop token."""
    stops, rows = torch.isin(tokens, policy.stop_ids).cpu(), []
    for prompt, stop, *drawn in zip(prompts, stops, tokens.cpu(), logprobs.cpu(), entropies.cpu()):
        length = int(stop.int().argmax()) + 1 if stop.any() else len(stop)
        rows.append(Completion(prompt, *(x[:length].clone() for x in drawn), torch.ones(length, dtype=torch.bool),
                               finished=bool(stop.any())))
    return rows


def allowed_logprobs(logits, forbidden_ids, temperature):
    """(..., V) logits -> float32 log-softmax at `temperature` (0: at 1) over all but the forbidden tokens (6)."""
    logits = logits.float().index_fill(-1, forbidden_ids, -math.inf)
    return (logits / (temperature or 1.0)).log_softmax(-1)


def draw_tokens(logits, forbidden_ids, temperature, top_p, uniforms):
    """(n, V) logits -> the tokens drawn (n,), their log-probabilities (n,), and the entropy of what they came from."""
    logprobs = allowed_logprobs(logits, forbidden_ids, temperature)
    token = draw(logprobs, temperature, top_p, uniforms)
    return token, logprobs.gather(1, token[:, None])[:, 0], torch.special.entr(logprobs.exp()).sum(-1)


def draw(logprobs, temperature, top_p, uniforms):
    """(n, V) -> (n,) tokens: greedy at temperature 0, else from the nucleus of mass `top_p`, as `uniforms` (n,) say."""
    if temperature == 0:
        return logprobs.argmax(-1)
    if top_p < 1:
        ordered, index = logprobs.sort(-1, descending=True)
        outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p  # the tokens before it already hold top_p
        logprobs = logprobs.masked_fill(outside.gather(-1, index.argsort(-1)), -math.inf)
    # Inverse of the cumulative probabilities: the first token whose sum exceeds `wanted`. A token of probability 0 has
    # the sum of the token before. `wanted` is kept below the total, to which the product may round.
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    wanted = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]


@memory_phase("sampling", "--rollouts-at-once")
@torch.no_grad()
def generate(policy, prompts, max_tokens, temperature=1.0, top_p=1.0, uniforms=None):
    """What `sample` does, by transformers' `generate`: a cross-check, slower, since each row prefills its prompt.
    Draws come from torch's random state, not from `uniforms`; log-probabilities come from one pass of the learner."""
    ids, visible, positions = left_padded(prompts, policy.device)
    check_context(policy.base, ids.shape[1], max_tokens)
    drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    tokens = policy.base.eval().generate(  # (6); what is not set here would come from the model's folder
        ids, attention_mask=visible.long(), position_ids=positions, max_new_tokens=max_tokens, num_beams=1, top_k=0,
        typical_p=1.0, min_p=0.0, repetition_penalty=1.0, no_repeat_ngram_size=0, eos_token_id=policy.stop_ids.tolist(),
        suppress_tokens=policy.forbidden_ids.tolist(), pad_token_id=policy.tokenizer.pad_token_id, **drawing,
        **figure_inputs([prompt.figure for prompt in prompts]))[:, ids.shape[1]:]
    rows = cut_completions(policy, prompts, tokens, *torch.zeros(2, *tokens.shape))
    for micro in micro_batches(rows):
        for row, *both in zip(micro, *completion_logprobs(policy, micro, temperature, with_entropies=True)):
            row.logprobs, row.entropies = (x[:len(row.tokens)].cpu() for x in both)
    return rows


SAMPLERS = {"loop": sample, "generate": generate}


# ----------------------------------------------------------------------------------------------------- Advantages
# A rule takes the rewards (B, G) of B groups and gives the advantages (B, G).

def reward_minus_mean(rewards):  # (1) a completion that beats its group's mean becomes more likely
    return rewards - rewards.mean(1, keepdim=True)


def reward_minus_mean_over_std(rewards):  # as in the paper: arXiv 2402.03300, section 4.1.2
    return reward_minus_mean(rewards) / (rewards.std(1, keepdim=True) + 1e-8)


ADVANTAGES = {"grpo": reward_minus_mean, "grpo_std": reward_minus_mean_over_std}  # add yours here


def equal_rewards(rewards):
    """(B, G) -> (B,) bool: all rewards of the group are equal."""
    return (rewards == rewards[:, :1]).all(1)


def group_advantages(rewards, rule="grpo"):
    """(B, G) rewards -> (B, G) advantages by a rule of ADVANTAGES.

    Exactly 0 for a group whose rewards are all equal (5), where rounding of the mean would leave noise.
    """
    return ADVANTAGES[rule](rewards).masked_fill(equal_rewards(rewards)[:, None], 0.0)


# --------------------------------------------------------------------------------------------------------- Learner
def completion_logprobs(policy, rows, temperature, with_entropies=False):
    """(n, T) log-probabilities, with gradients, of completions of ONE prompt, by the policy as it is now.

    One forward pass: the prompt runs once, and the completions branch from it (support/branching.py). Vocabulary and
    temperature are the sampler's. 0 behind a row's end. `with_entropies` also gives the entropies (n, T).
    """
    model, prompt, lengths = policy.base, rows[0].prompt, [len(row.tokens) for row in rows]
    after = [torch.arange(n).expand(3, -1) + prompt.next_position for n in lengths]  # all start behind the prompt
    hidden = model.model(
        input_ids=torch.cat([prompt.ids, *(row.tokens for row in rows)])[None].to(policy.device),
        position_ids=torch.cat([prompt.positions, *after], 1)[:, None].to(policy.device), use_cache=False,
        branches=Branches(len(prompt.ids), tuple(lengths)), **figure_inputs([prompt.figure]))[0][0]  # (L, H)
    # A token is predicted by the state before it: the first ones by the prompt's last state.
    last, *own = hidden[len(prompt.ids) - 1:].split([1, *lengths])
    states = torch.cat([part for of_row in own for part in (last, of_row[:-1])])  # (N, H)
    tokens = torch.cat([row.tokens for row in rows]).to(policy.device)
    # Only a chunk of logits exists at a time: checkpoint drops it, and the backward pass makes it again.
    parts = [checkpoint(token_logprobs, model.get_output_embeddings(), *chunk, policy.forbidden_ids, temperature,
                        with_entropies, use_reentrant=False)
             for chunk in zip(states.split(LOGIT_CHUNK), tokens.split(LOGIT_CHUNK))]
    results = [pad_sequence(torch.cat(column).split(lengths), batch_first=True) for column in zip(*parts)]
    return results if with_entropies else results[0]


def token_logprobs(head, states, tokens, forbidden_ids, temperature, with_entropies):
    """(N, H) states and (N,) tokens -> the tokens' log-probabilities (N,), and where asked entropies (N,), a tuple."""
    logprobs = allowed_logprobs(head(states), forbidden_ids, temperature)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return (chosen, torch.special.entr(logprobs.exp()).sum(-1)) if with_entropies else (chosen,)


@memory_phase("learning", "--tokens-per-micro-batch")
@torch.no_grad()
def frozen_logprobs(policy, rows, config):
    """[(T,)] log-probabilities of rows without gradients, at the sampler's temperature: a teacher's, or the base's."""
    policy.base.eval()
    found = {}
    for micro in micro_batches(rows, config.tokens_per_micro_batch):
        logprobs = completion_logprobs(policy, micro, config.temperature).cpu()
        found |= {row: own[:len(row.tokens)] for row, own in zip(micro, logprobs)}
    return [found[row] for row in rows]


@memory_phase("learning", "--tokens-per-micro-batch")
def accumulate_gradients(policy, micros, config):
    """Adds the gradient of the reduced loss over all rows of the micro-batches to the adapter's.

    -> (loss, log-probabilities [(T,)] in the order of `micros`, losses.clip_counts or None). Denominators are fixed
    first, so the way rows are cut into micro-batches changes nothing."""
    policy.base.train()  # activation checkpointing works in training mode only; nothing here has dropout
    rows = [row for micro in micros for row in micro]
    reduction = LOSS_REDUCTIONS[reduction_of(config.loss_fn, config.loss_reduction)]  # (4)
    weights = reduction(rectangle(rows, "trained"), config.max_tokens)  # (N, T)
    total, logprobs, counts = 0.0, [], []
    for micro, weight in zip(micros, weights.to(policy.device).split([len(micro) for micro in micros])):
        current = completion_logprobs(policy, micro, config.temperature)  # (n, T)
        loss, clipped = micro_batch_loss(micro, current, config)
        loss = (loss * weight[:, :loss.shape[1]]).sum()
        loss.backward()
        total += loss.detach()
        counts.append(clipped)
        logprobs += [own[:len(row.tokens)] for row, own in zip(micro, current.detach())]
    logprobs = torch.cat(logprobs).cpu().split([len(row.tokens) for row in rows])  # one copy to the host
    return float(total), logprobs, None if counts[0] is None else sum(counts)


def update(policy, optimizer, rows, config):
    """Learns from the rows that train, an optimiser step a minibatch. Gives metrics.

    A minibatch is a union of whole micro-batches, which are cut once. dlogp = |logp - old_logp| is taken at the first
    step, where the learner is still the sampling policy. Numbers that are not finite raise NonFinite before the
    optimiser is touched; `--on-nonfinite skip` leaves the minibatch out and counts it."""
    steps, nonfinite, dlogp = [], 0, None
    micros = micro_batches(rows, config.tokens_per_micro_batch)
    for _ in range(config.updates_per_rollout if micros else 0):  # (2)
        shuffled = torch.randperm(len(micros)) if config.minibatches > 1 else torch.arange(len(micros))
        for part in shuffled.tensor_split(min(config.minibatches, len(micros))):
            minibatch = [micros[i] for i in part.tolist()]
            loss, logprobs, counts = accumulate_gradients(policy, minibatch, config)
            norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm or math.inf))
            these = [row for micro in minibatch for row in micro]
            old = torch.cat([row.logprobs[row.trained] for row in these])
            new = torch.cat([own[row.trained] for own, row in zip(logprobs, these)])
            if not (math.isfinite(loss + norm) and (new + old).isfinite().all()):
                optimizer.zero_grad(set_to_none=True)
                nonfinite += 1
                if config.on_nonfinite == "skip":
                    continue
                raise NonFinite(these, logprobs, loss, norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            dlogp = (new - old).abs() if dlogp is None else dlogp
            steps.append({"trainer/loss_mean": loss, **ratio_metrics(new, old), **clip_metrics(counts),
                          "trainer/grad_norm": norm})
    return update_metrics(steps, len(rows), nonfinite, dlogp)


# ------------------------------------------------------------------------------------------------------------ Loop
@dataclass
class Batch:
    """The completions of a step, judged; those of question b are rows b*G to (b+1)*G - 1."""

    rows: list[Completion]
    group_size: int
    waves: int = 0  # times that questions were drawn

    @property
    def questions(self):
        return [row.prompt.question for row in self.rows[::self.group_size]]

    @property
    def rewards(self):
        return torch.tensor([row.reward for row in self.rows]).view(-1, self.group_size)  # (B, G)


def answer(policy, asked, config, task):
    """[(key of its draws, question)] -> [Completion], `group_size` for each question: encode, sample, read."""
    prompts = encode_prompts(policy, [question for _, question in asked], task, config.max_image_tokens)
    prompts = [prompt for prompt in prompts for _ in range(config.group_size)]
    uniforms = uniform_numbers([key for key, _ in asked], config.group_size, config.max_tokens)
    rows, at_once = [], config.rollouts_at_once or len(prompts)
    for i in range(0, len(prompts), at_once):
        rows += SAMPLERS[config.sampler](policy, prompts[i:i + at_once], config.max_tokens, config.temperature,
                                         config.top_p, uniforms[i:i + at_once])
    for row in rows:
        row.text = policy.tokenizer.decode(row.tokens, skip_special_tokens=True)
        row.reading = task.read(row.text, row.prompt.question)
    return rows


def draw_batch(policy, order, config, task):
    """-> Batch. Dynamic sampling (DAPO, section 3.2) asks for more questions until `batch_size` groups have unequal
    rewards, or MOST_CANDIDATES times as many were drawn."""
    weights, missing = reward_weights(config.reward, task.rewards), config.batch_size
    batch, left = Batch([], config.group_size), missing * (MOST_CANDIDATES if config.dynamic_sampling else 1)
    while missing and left:
        asked = order.take(min(missing, left))
        wave = Batch(answer(policy, asked, config, task), config.group_size)
        for row in wave.rows:
            reward_completion(row, task.rewards, weights)
        batch.rows += wave.rows
        batch.waves += 1
        left -= len(asked)
        missing -= int((~equal_rewards(wave.rewards)).sum())
    return batch


def set_advantages(batch, config):
    """Sets each row's advantage; gives the rewards with the length penalty, (B, G)."""
    lengths = torch.tensor([row.length for row in batch.rows]).view(-1, batch.group_size)
    rewards = batch.rewards + (overlong_penalty(lengths, config.max_tokens) if config.overlong_penalty else 0.0)
    advantages = group_advantages(rewards, config.advantage)
    advantages = advantages.masked_fill(equal_rewards(batch.rewards)[:, None], 0.0)  # (5) where only lengths differ too
    for row, advantage in zip(batch.rows, advantages.flatten().tolist()):
        row.advantage = advantage
    return rewards


def training_rows(batch, config):
    """The rows of groups with an advantage other than 0 (5), or of all with a KL term; with --mask-truncated, uncut."""
    groups = [list(rows) for _, rows in itertools.groupby(batch.rows, key=lambda row: row.prompt)]
    groups = [rows for rows in groups if config.kl_coef or any(
        torch.where(row.trained, row.advantage, 0.0).any() for row in rows)]
    return [row for rows in groups for row in rows if row.length and (row.finished or not config.mask_truncated)]


def train_step(policy, optimizer, order, config, task=GEOQA, teacher=None):
    """One step: sample, reward, compare, update -> (metrics, Batch).

    `teacher(batch, config)` sets each row's advantage, (T,), in place of the comparison, and gives metrics.
    """
    clock = StepClock(policy.device)
    batch = draw_batch(policy, order, config, task)
    clock.sampled()
    shaped = set_advantages(batch, config)
    extra = teacher(batch, config) if teacher else {}
    if config.kl_coef:  # (3)
        with policy.model.disable_adapter():
            for row, logprobs in zip(batch.rows, frozen_logprobs(policy, batch.rows, config)):
                row.reference_logprobs = logprobs
    learned = update(policy, optimizer, training_rows(batch, config), config)
    clock.learned()
    return batch_metrics(batch, shaped, clock.sampling) | extra | learned | clock.metrics(), batch


def train(config, task=GEOQA, load_teacher=None):
    """Trains as `config` says and gives the run directory's path. Raises UserError for anything the user can fix.

    `load_teacher(policy, config)` gives the `teacher` of train_step.
    """
    run, policy, teacher, questions = prepare(config, task, load_teacher)
    config = run.config  # as it is after checks, preset, adapter and memory plan
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    with run:  # what ends it early leaves the last complete step as a checkpoint
        before = evaluate_policy(policy, questions["eval"], run, task) if config.evaluate else None  # still as it began
        torch.manual_seed(config.seed)  # so that torch's draws are the same with and without an evaluation
        done, drawn = run.restore(policy, optimizer)  # 0, 0 except with --resume
        order = Order(questions["train"], config.seed, drawn)
        for step in tqdm(range(done + 1, config.steps + 1), "steps", config.steps, initial=done, disable=None):
            order.step = step
            metrics, batch = train_step(policy, optimizer, order, config, task, teacher)
            run.save_step(step, metrics, batch)
            if step == config.steps or (config.save_every and step % config.save_every == 0):
                run.checkpoint()
                write_report(run.path)
        after = evaluate_policy(policy, questions["eval"], run, task, config.steps) if config.evaluate else None
        run.finish(before, after)
    write_report(run.path)
    return run.path


def evaluate(config, task=GEOQA):
    """Evaluates the base policy, or the one with `--adapter`; gives the summary that `results.json` holds."""
    run, policy, _, questions = prepare(dataclasses.replace(config, eval_only=True), task)
    records = evaluate_policy(policy, questions["eval"], run, task)
    results = run.finish(None, records) if config.adapter else run.finish(records, None)
    write_report(run.path)
    return results


def prepare(config, task, load_teacher=None):
    """-> (run directory, whose config is complete; policy; teacher or None; questions: {"train": ..., "eval": ...}).
    Cheap checks come first: a wrong flag or data set ends the run before gigabytes of weights are fetched."""
    config = checked_config(config, task.rewards)
    pick_device(config.device)
    path = free_run_path(config)
    questions = {} if config.eval_only else {"train": require_questions(task.load(config, "train"), "train")}
    if config.evaluate:
        questions["eval"] = require_questions(task.load(config, config.eval_split), config.eval_split)
    policy = load_policy(config)
    teacher = load_teacher(policy, config) if load_teacher else None
    config = dataclasses.replace(config, lora_rank=policy.model.peft_config["default"].r)  # an --adapter brings its own
    asked = next(iter(questions.values()))
    if policy.device.type == "cuda":
        config = fit_memory(ALGORITHM, policy, task, asked, config)
    run = RunDir(path, config, {"model": policy.revision, "dataset": asked.revision})
    run.tell(note for split in questions.values() for note in split.notes)
    if len(asked) < config.batch_size and not config.eval_only:
        run.tell([f"{len(asked)} training questions are fewer than --batch-size: a step repeats some"])
    return run, policy, teacher, questions


def evaluate_policy(policy, questions, run, task, step=0):
    """Answers `questions` (greedy by default), writes `eval-NAME.json` and gives its records, one dict a question."""
    name = f"step-{step}" if step else "adapter" if run.config.adapter else "base"
    if records := run.evaluation(name):
        return records  # made before the run was interrupted
    config = dataclasses.replace(run.config, temperature=run.config.eval_temperature, group_size=1)
    records, meter, order = [], Meter(policy.device), Order(questions, config.seed)  # step 0: no training step's draws
    with tqdm(total=len(questions), desc=f"evaluating {name}", disable=None) as bar:
        while order.place < len(questions):
            asked = order.take(min(config.eval_batch_size, len(questions) - order.place))
            records += run.evaluation_records(answer(policy, asked, config, task))
            bar.update(len(asked))
    run.save_evaluation(name, records, meter.evaluation())
    return records


def main(config, task=GEOQA, load_teacher=None):
    if config.plan:
        return print(plan_text(ALGORITHM, checked_config(config, task.rewards)))
    return evaluate(config, task) if config.eval_only else train(config, task, load_teacher)


ALGORITHM = Algorithm(encode_prompts, prefill, draw_tokens, next_logits, completion_logprobs, accumulate_gradients,
                      Completion)  # what the memory plan and the dry run call

if __name__ == "__main__":
    run_command_line(Config, main)
