"""Vision GRPO on one GPU: teaches a vision-language model geometry by reinforcement learning.

    python grpo.py                       # Qwen3.5-4B on GeoQA, one 24 GB card
    python demo.py                       # the same code on a tiny model and drawn figures, any machine

Each step draws G completions for each of B questions, rewards a right final \\boxed{letter} with 1, and makes the
completions that beat their group's mean more likely (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1).

Where this differs from the paper, and why:
 1. The advantage is reward - mean. The paper also divides by the group's standard deviation (`--normalize-std`); the
    experiment reproduced here does not, and dividing weighs nearly solved and nearly hopeless questions up.
 2. By default one update a batch, so no clipping: the loss is -ratio * advantage with ratio = exp(logp - old_logp),
    which is 1 up to rounding. `old_logp` is what the sampler gave the token when it drew it. With clipping:
    `--loss-fn ppo --updates-per-rollout 2`.
 3. No KL term to a reference model, as in the experiment reproduced here (`--kl-coef` adds one).
 4. The mean runs over all completion tokens of the step. The paper takes it within each row first, which makes a token
    of a long wrong answer count less than one of a short wrong answer.
 5. Groups whose rewards are all equal have no signal: they are skipped and counted.
 6. The policy is a 4-bit base with a LoRA adapter, and image tokens cannot be drawn: sampler and learner both take the
    softmax over the remaining vocabulary.
"""

import contextlib
import dataclasses
import inspect
import itertools
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from support.checkpoints import NonFinite, nonfinite_record
from support.cost import Meter, gpu_joules, step_energy
from geoqa import load_geoqa
from support.errors import UserError
from support.kv_cache import join_caches
from support.models import add_lora, checkpoints_activations, fused_kernels, kernels_line, load_base, pick_device
from support.plan import fit_memory, memory_phase, plan_text
from report import write_report
from reward import grade
from support.rundir import RunDir, batch_metrics, free_run_path, token_texts, update_metrics
from support.command_line import check_config, check_solutions, run_command_line, with_preset
from support.trackers import PROJECT
from vision_tokens import Prompts, encode_figures, encode_prompts, join_prompts, prompt_positions, select_figures

LOGIT_CHUNK = 256  # tokens whose logits exist at once in the learner: 0.25 GB in float32, and a few copies of it
PREFILL_TOKENS = 4096  # prompt tokens, padding included, that go through the model at once in the sampler
TOKENS_PER_MICRO_BATCH = 8192  # where no memory plan has set it


# ---------------------------------------------------------------------------------------------------------- Config


def flag(default, help):
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    base_model: str = flag("Qwen/Qwen3.5-4B", "policy: a hub id or a local folder")
    model_revision: str = flag("", "commit, tag or branch of the policy on the hub; empty: the newest")
    adapter: str = flag("", "folder of a LoRA adapter to start from")
    dataset: str = flag("hz2475/geoQA", "questions: a hub id or a local folder")
    dataset_revision: str = flag("", "commit, tag or branch of the data set on the hub; empty: the newest")
    max_samples: int = flag(0, "train on the first N shuffled questions only; 0: on all")
    max_image_tokens: int = flag(1024, "figures above this many visual tokens are downsized; 0: never")

    steps: int = flag(100, "training steps, one batch of questions each")
    batch_size: int = flag(8, "questions a step")
    group_size: int = flag(8, "completions a question")
    max_tokens: int = flag(1024, "most new tokens of a completion, in training and evaluation")
    temperature: float = flag(1.0, "softmax temperature of the rollouts")
    top_p: float = flag(1.0, "nucleus of a sampled evaluation; training needs 1")
    lora_rank: int = flag(32, "rank of the adapter; alpha equals it")
    learning_rate: float = flag(4e-5, "AdamW's, constant")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm; 0: never")
    algorithm: Literal["grpo", "dapo"] = flag("grpo", "dapo: sets those flags below that are at their default")
    loss_fn: str = flag("importance_sampling", "per-token loss: importance_sampling, ppo, cispo or gspo")
    clip_low: float | None = flag(None, "`low` of the loss's formula; unset: the loss's own")
    clip_high: float | None = flag(None, "`high` of the loss's formula; unset: the loss's own")
    loss_reduction: Literal["auto", "token", "sequence", "constant"] = flag(
        "auto", "how token losses become one: auto is sequence for gspo, else token")
    updates_per_rollout: int = flag(1, "passes over one batch of rollouts")
    minibatches: int = flag(1, "shuffled parts of a pass, an optimiser step after each")
    normalize_std: bool = flag(False, "divide advantages by the group's standard deviation")
    kl_coef: float = flag(0.0, "weight of the KL term to the base policy; above 0 all rows train")
    mask_truncated: bool = flag(False, "completions that hit the limit do not train")
    overlong_penalty: bool = flag(False, "lower the reward of completions near the limit, down to -1 at it")
    overlong_cache: int = flag(0, "tokens over which that penalty grows; 0: a quarter of --max-tokens")
    dynamic_sampling: bool = flag(False, "draw questions until --batch-size groups have unequal rewards")
    max_candidate_multiplier: int = flag(4, "dynamic sampling draws at most this many times --batch-size questions")
    advantage: Literal["reward", "opsd", "opd"] = flag(
        "reward", "reward; or distillation: opsd from the base that reads the solution, opd from --teacher-model")
    teacher_model: str = flag("", "hub id or folder of the teacher of --advantage opd")
    distill_coef: float = flag(1.0, "weight of the distillation advantage")
    seed: int = flag(42, "of the training order, the adapter's start and the draws; never of the test set")

    device: str = flag("auto", "auto: the CUDA GPU; or cuda, cuda:1, cpu")
    quantization: Literal["auto", "nf4", "none"] = flag("auto", "4-bit base; auto: nf4 on CUDA, none on a CPU")
    activation_checkpointing: Literal["auto", "on", "off"] = flag("auto", "recompute layers; auto: on CUDA only")
    fused_kernels: bool = flag(True, "use flash-linear-attention and causal-conv1d on CUDA where they are installed")
    tokens_per_micro_batch: int = flag(0, "tokens in one forward and backward pass of the learner; 0: what fits")
    rollouts_at_once: int = flag(0, "completions drawn at once, the others in further waves; 0: what fits")

    evaluate: bool = flag(True, "evaluate before and after training")
    eval_only: bool = flag(False, "evaluate, train nothing")
    eval_split: Literal["test", "dev"] = flag("test", "split of the evaluation questions")
    test_size: int = flag(100, "questions of the test split, always the same; 0: all; dev is always whole")
    eval_batch_size: int = flag(32, "questions decoded at once in evaluation")
    eval_temperature: float = flag(0.0, "softmax temperature of evaluation; 0: greedy")

    plan: bool = flag(False, "print what the setting takes in GPU memory, and do nothing else")

    resume: str = flag("", "run folder to continue as if it had never stopped; its settings are taken from there")
    save_every: int = flag(25, "steps between checkpoints; 0: only the last")
    keep_checkpoints: int = flag(0, "newest checkpoints to keep; 0: all")
    on_nonfinite: Literal["stop", "skip"] = flag("stop", "an update with NaN or infinity: stop, or leave it out")
    show_samples: bool = flag(False, "print one group of completions each step")
    log_token_changes: int = flag(0, "groups a step whose tokens' changes by the update are kept for the report")
    experiment_name: str = flag("", "name of the run's folder; empty: the policy's name and a number")
    tracker: Literal["none", "swanlab", "tensorboard", "wandb"] = flag("none", "program that also gets the metrics")
    swanlab_mode: Literal["cloud", "local", "offline", "disabled"] = flag("cloud", "where SwanLab keeps them")
    swanlab_project: str = flag(PROJECT, "SwanLab's project")
    electricity_price: float = flag(0.6, "yuan per kWh, for the cost in results.json")
    output_dir: str = flag("runs", "folder of the run folders")


# ---------------------------------------------------------------------------------------------------------- Policy


@dataclass
class Policy:
    """A frozen base with a trainable LoRA adapter, and what turns text and figures into its input."""

    model: object  # peft.PeftModel, or the bare base
    tokenizer: object
    image_processor: object
    stop_ids: torch.Tensor  # tokens that end a completion
    forbidden_ids: torch.Tensor  # image tokens: probability 0 in the sampler and in the learner
    revision: str = "local"

    @property
    def base(self):
        """The transformers model; PEFT has put the adapter's layers into it. A teacher has no adapter."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def device(self):
        return self.base.device

    def parameters(self):
        return [p for p in self.model.parameters() if p.requires_grad]


def load_policy(config):
    """Config -> Policy. On CUDA an NF4 base in bf16, on a CPU a float32 base; the adapter is float32 on both.

    Raises UserError where there is no GPU, no such model, or a model of another kind than loading.SUPPORTED_MODELS.
    """
    policy = load_frozen(config.base_model, config.model_revision, config)
    if checkpoints_activations(config.activation_checkpointing, policy.device.type):
        policy.base.activation_checkpointing_enable()
    torch.manual_seed(config.seed)  # the adapter's start
    policy.model = add_lora(policy.base, config.base_model, config.lora_rank, config.adapter)
    tqdm.write(kernels_line(policy.base, config.fused_kernels))
    return policy


def load_frozen(name, revision, config):
    """A model from the hub or a folder as a Policy without adapter: the base of the policy, or a teacher."""
    base, tokenizer, image_processor, revision = load_base(name, revision, pick_device(config.device),
                                                           config.quantization)
    fused_kernels(base, config.fused_kernels)
    stop_ids = base.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(stop_ids if isinstance(stop_ids, list) else [stop_ids])} - {None}
    forbidden_ids = {getattr(base.config, name, None) for name in (
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")} - {None}
    return Policy(base, tokenizer, image_processor, torch.tensor(sorted(stop_ids), device=base.device),
                  torch.tensor(sorted(forbidden_ids), device=base.device), revision)


# ---------------------------------------------------------------------------------------------------------- Sampler


@dataclass
class Rollouts:
    """B*G completions; those of question b are rows b*G to (b+1)*G - 1. Beyond a row's length: padding."""

    tokens: torch.Tensor  # (B*G, T), the stop token included
    logprobs: torch.Tensor  # (B*G, T) float32, of the full softmax at `temperature`, as the sampler drew
    entropies: torch.Tensor  # (B*G, T) float32, nats, of the distribution that the token was drawn from
    lengths: torch.Tensor  # (B*G,)
    finished: torch.Tensor  # (B*G,) bool, False where the limit cut the completion
    temperature: float

    @property
    def mask(self):
        """(B*G, T) bool. From lengths: a mask from `token == pad` would hide real end tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


def join_rollouts(waves):
    """Rollouts of the same length limit, one below the other."""
    names = ("tokens", "logprobs", "entropies", "lengths", "finished")
    return Rollouts(*(torch.cat([getattr(wave, name) for wave in waves]) for name in names), waves[0].temperature)


@memory_phase("sampling", "--rollouts-at-once")
@torch.no_grad()
def sample(policy, prompts, group_size, max_tokens, temperature=1.0, top_p=1.0, rollouts_at_once=0, progress=None):
    """Draws `group_size` completions of at most `max_tokens` tokens for each prompt -> Rollouts.

    Temperature 0 decodes greedily (logprobs are then those at temperature 1); top_p < 1 draws from the nucleus but
    still reports logprobs of the full softmax. Both are for evaluation. Rows beyond `rollouts_at_once` (0: all fit)
    are drawn in further waves. `progress` is a tqdm bar or None.
    Raises UserError where prompt and completion together exceed the model's context.
    """
    model, device = policy.base.eval(), policy.device
    context = model.config.text_config.max_position_embeddings
    if prompts.input_ids.shape[1] + max_tokens > context:
        raise UserError(f"a prompt of {prompts.input_ids.shape[1]} tokens and --max-tokens {max_tokens} exceed the "
                        f"model's context of {context}")
    rows = prompts.input_ids.shape[0] * group_size
    shape = rows, max_tokens
    rollouts = Rollouts(torch.full(shape, policy.tokenizer.pad_token_id, device=device),
                        torch.zeros(shape, device=device), torch.zeros(shape, device=device),
                        torch.zeros(rows, dtype=torch.long, device=device),
                        torch.zeros(rows, dtype=torch.bool, device=device), temperature)
    encode_figures(model, prompts)
    for wave in torch.arange(rows, device=device).split(rollouts_at_once or rows):
        which, prompt_of_row = (wave // group_size).unique(return_inverse=True)
        cache, logits = prefill(policy, prompts, which)
        cache.reorder_cache(prompt_of_row)  # each prompt was prefilled once, and now serves all its rows
        decode(policy, prompts, rollouts, wave, wave // group_size, cache, logits[prompt_of_row], top_p, progress)
        del cache, logits  # before the next wave has its own
    return rollouts


def prefill(policy, prompts, which):
    """Runs the prompts `which` (n,) through the model, a few at a time -> (cache, (n, V) logits of the next token)."""
    model, parts = policy.base, []
    for some in which.split(max(1, PREFILL_TOKENS // prompts.input_ids.shape[1])):
        parts.append(model.generate(
            prompts.input_ids[some], attention_mask=prompts.attention_mask[some],
            position_ids=prompt_positions(model, prompts)[:, some],
            mm_encoder_outputs=select_figures(prompts.features, some.tolist()), custom_generate=first_forward,
            do_sample=False, num_beams=1, num_return_sequences=1, max_new_tokens=1,
            pad_token_id=policy.tokenizer.pad_token_id))
    return join_caches([cache for cache, _ in parts]), torch.cat([logits for _, logits in parts])


def first_forward(model, input_ids, **prepared):
    """Called by `model.generate` with the cache and inputs that it has prepared -> (cache, (n, V) logits)."""
    for unused in ("logits_processor", "stopping_criteria", "generation_config"):
        prepared.pop(unused)  # top-k 20 and top-p 0.95 of the model's folder among them: they would skew logprobs
    outputs = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **prepared))
    return outputs.cache, outputs.logits[:, -1]


def decode(policy, prompts, rollouts, row, which, cache, logits, top_p, progress):
    """Draws the rollouts `row` (n,), whose prompts are `which` (n,), token by token, and writes them to `rollouts`.

    `cache` holds the n prompts and `logits` (n, V) what follows them.
    """
    model, max_tokens, device = policy.base, rollouts.tokens.shape[1], row.device
    prompt_width, total = prompts.input_ids.shape[1], len(row)
    attention_mask = F.pad(prompts.attention_mask[which].bool(), (0, max_tokens), value=True)  # (n, P + T)
    position = next_position(prompt_positions(model, prompts))[which]  # (n,)
    alive = torch.ones(total, dtype=torch.bool, device=device)
    check_every = finished_check_interval(device)
    if progress is not None:
        progress.reset(max_tokens)

    for t in range(max_tokens):
        token, logprob, entropy = draw_tokens(logits, policy.forbidden_ids, rollouts.temperature, top_p)  # (n,) each
        token = torch.where(alive, token, policy.tokenizer.pad_token_id)
        rollouts.tokens[row, t] = token
        rollouts.logprobs[row, t] = logprob * alive
        rollouts.entropies[row, t] = entropy * alive
        rollouts.lengths[row] += alive
        alive &= ~(token[:, None] == policy.stop_ids).any(1)
        rollouts.finished[row] = ~alive
        if progress is not None:
            progress.update()
        if t + 1 == max_tokens:
            break
        if (t + 1) % check_every == 0:
            keep = alive.nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) < len(row):
                cache.reorder_cache(keep)
                row, token, attention_mask, position = row[keep], token[keep], attention_mask[keep], position[keep]
                alive = alive[keep]
            if progress is not None:
                progress.set_postfix_str(f"{len(row)} of {total} rows unfinished", refresh=False)
        # Positions are given: model.rope_deltas is state that goes stale when rows are expanded or dropped.
        # The mask has its 4 dimensions already: a 2-dimensional one is read by the host for each token.
        logits = model(input_ids=token[:, None], attention_mask=attention_mask[:, None, None, :prompt_width + t + 1],
                       position_ids=(position + t).expand(3, -1)[..., None], cache=cache, use_cache=True,
                       logits_to_keep=1).logits[:, -1]


def finished_check_interval(device):
    """Tokens between two looks for finished rows: a look makes a GPU wait for its queue, and costs a CPU nothing."""
    return 16 if device.type == "cuda" else 1


def next_position(positions):
    """(3, B, P) -> (B,) position of a completion's first token: not the length, figures take fewer than tokens."""
    return positions[:, :, -1].amax(0) + 1


def allowed_logprobs(logits, forbidden_ids, temperature):
    """(..., V) logits -> float32 log-softmax at `temperature` (0: at 1) over all but the forbidden tokens."""
    logits = logits.float().index_fill(-1, forbidden_ids, -math.inf)
    return (logits / (temperature or 1.0)).log_softmax(-1)


def draw_tokens(logits, forbidden_ids, temperature, top_p):
    """(n, V) logits -> the tokens drawn (n,), their log-probabilities (n,), and the entropy of what they came from."""
    logprobs = allowed_logprobs(logits, forbidden_ids, temperature)
    token = draw(logprobs, temperature, top_p)
    return token, logprobs.gather(1, token[:, None])[:, 0], torch.special.entr(logprobs.exp()).sum(-1)


def draw(logprobs, temperature, top_p):
    """(rows, V) -> (rows,) tokens: greedy at temperature 0, else a draw from the nucleus of mass `top_p`."""
    if temperature == 0:
        return logprobs.argmax(-1)
    if top_p < 1:
        ordered, index = logprobs.sort(-1, descending=True)
        outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p  # mass of the better tokens reaches top_p
        logprobs = logprobs.masked_fill(outside.gather(-1, index.argsort(-1)), -math.inf)
    # Gumbel-max: argmax(logp + Gumbel noise) is a draw from softmax(logp). torch.multinomial would stop a GPU to check.
    return (logprobs - torch.empty_like(logprobs).exponential_().log()).argmax(-1)


# ---------------------------------------------------------------------------------------------------------- Advantages


def degenerate_groups(rewards):
    """(B, G) -> (B,) bool: all rewards of the group are equal."""
    return (rewards == rewards[:, :1]).all(1)


def group_advantages(rewards, normalize_std=False):
    """(B, G) rewards -> (B, G) advantages: reward - group mean, and with `normalize_std` over the group's deviation.

    Exactly 0 for a group whose rewards are all equal, where rounding of the mean would leave noise, and dividing by a
    deviation near 0 would blow it up. Formula: arXiv 2402.03300, section 4.1.2.
    """
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalize_std:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-8)
    return advantages.masked_fill(degenerate_groups(rewards)[:, None], 0.0)


def overlong_penalty(lengths, max_tokens, cache):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to max_tokens - cache, then linearly to -1."""
    return ((max_tokens - cache - lengths) / cache).clamp(-1.0, 0.0)


# ---------------------------------------------------------------------------------------------------------- Losses
#
# A loss takes (n, T) logprobs, old_logprobs (the sampler's), advantages and mask, and its clip bounds as keyword
# arguments, and gives a loss for each token (n, T); what it gives outside the mask is ignored.

MAX_LOG_RATIO = 20.0  # log-ratios are clamped to +-20: squares of larger ratios overflow float32 in the gradient's norm


def log_ratio(logprobs, old_logprobs):
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_sampling(logprobs, old_logprobs, advantages, mask):
    """-ratio A with ratio = exp(logp - old_logp): the article's loss, and REINFORCE's gradient at ratio 1."""
    return -log_ratio(logprobs, old_logprobs).exp() * advantages


def ppo(logprobs, old_logprobs, advantages, mask, low=0.2, high=0.2):
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7)."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def cispo(logprobs, old_logprobs, advantages, mask, low=0.0, high=4.0):
    """-stop_gradient(clip(ratio, low, high)) A logp: clipped tokens keep a gradient (MiniMax-M1, arXiv 2506.13585)."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return -ratio.clamp(low, high).detach() * advantages * logprobs


def gspo(logprobs, old_logprobs, advantages, mask, low=3e-4, high=4e-4):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s the exp of the row's mean log-ratio (GSPO, arXiv 2507.18071)."""
    s = sequence_ratio(logprobs, old_logprobs, mask)  # (n, 1)
    return -torch.minimum(s * advantages, s.clamp(1 - low, 1 + high) * advantages)


def sequence_ratio(logprobs, old_logprobs, mask):
    """(n, T) -> (n, 1) geometric mean of a row's token ratios."""
    mean = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


LOSS_FNS = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo, "gspo": gspo}  # add yours here


@torch.no_grad()
def loss_diagnostics(name, logprobs, old_logprobs, advantages, mask, low=None, high=None, **other_bounds):
    """What a loss did to these rows -> metrics: ratios, approximate KL(old || new), and the share that was clipped.

    k1 = -log ratio and k3 = ratio - 1 - log ratio both estimate the KL divergence without bias
    (http://joschu.net/blog/kl-approx.html); k3 is never negative.
    """
    log = log_ratio(logprobs, old_logprobs)
    ratio, metrics = log.exp(), {}
    metrics |= {"trainer/ratio_mean": ratio[mask].mean(), "trainer/ratio_min": ratio[mask].min(),
                "trainer/ratio_max": ratio[mask].max(), "trainer/kl_k1": -log[mask].mean(),
                "trainer/kl_k3": (ratio - 1 - log)[mask].mean()}
    if name == "ppo":  # clipped: where the minimum took the constant
        clipped_low, clipped_high = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
        key = "ppo/clip_fraction"
    elif name == "cispo":
        clipped_low, clipped_high, key = ratio < low, ratio > high, "cispo/clip_fraction"
        metrics["cispo/ratio_mean"] = metrics["trainer/ratio_mean"]
    elif name == "gspo":
        s = sequence_ratio(logprobs, old_logprobs, mask)
        clipped_low, clipped_high = (s < 1 - low) & (advantages < 0), (s > 1 + high) & (advantages > 0)
        mask, key = mask & (mask.cumsum(1) == 1), "gspo/sequence_clip_fraction"  # one vote a row
    else:
        return {key: value.item() for key, value in metrics.items()}
    low_share, high_share = clipped_low[mask].float().mean(), clipped_high[mask].float().mean()
    metrics |= {key: low_share + high_share, f"{key}_low": low_share, f"{key}_high": high_share}
    return {key: value.item() for key, value in metrics.items()}


def loss_bounds(config):
    """The keyword arguments of the chosen loss: its own defaults, but for what the command line sets."""
    own = {name: p.default for name, p in inspect.signature(LOSS_FNS[config.loss_fn]).parameters.items()
           if p.default is not inspect.Parameter.empty}
    given = {"low": config.clip_low, "high": config.clip_high}
    return own | {name: value for name, value in given.items() if name in own and value is not None}


def loss_reduction(config):
    if config.loss_reduction != "auto":
        return config.loss_reduction
    return "sequence" if config.loss_fn == "gspo" else "token"


# Loss reductions: (n, T) mask of all rows of an update -> (n, T) weights; the update's loss is sum(weights * loss).
# Rows that do not train, such as those of degenerate groups, are not among the n and count in no denominator.
LOSS_REDUCTIONS = {
    "token": lambda mask, max_tokens: mask / mask.sum(),  # one mean over all tokens (DAPO, eq. 12)
    "sequence": lambda mask, max_tokens: mask / mask.sum(1, keepdim=True) / len(mask),  # GRPO: within rows, over rows
    "constant": lambda mask, max_tokens: mask / (len(mask) * max_tokens),  # Dr. GRPO (arXiv 2503.20783)
}


# ---------------------------------------------------------------------------------------------------------- Learner


def completion_logprobs(policy, prompts, rollouts, rows):
    """(len(rows), T) log-probabilities with gradients of the rollouts `rows` (ints) under the policy as it is now.

    One teacher-forced forward pass over prompt and completion, at `rollouts.temperature` and over the same allowed
    vocabulary as the sampler. 0 beyond a row's length.
    """
    model, prompt_width = policy.base, prompts.input_ids.shape[1]
    rows = torch.as_tensor(rows, device=policy.device)
    which = rows // (len(rollouts.tokens) // len(prompts.ids))  # the prompt of each row
    mask, tokens = rollouts.mask[rows], rollouts.tokens[rows]  # (n, T)
    prompt_position = prompt_positions(model, prompts)[:, which]  # (3, n, P)
    position = next_position(prompt_position)[:, None] + torch.arange(tokens.shape[1], device=policy.device)  # (n, T)
    # A row is shifted left by its prompt's padding, which then comes last: causal attention needs no mask for it.
    prompt_length = prompts.attention_mask[which].sum(-1, keepdim=True)  # (n, 1)
    length = prompt_length + rollouts.lengths[rows][:, None]
    column = torch.arange(int(length.max()), device=policy.device)  # (W,)
    shifted = (column + prompt_width - prompt_length).clamp(max=prompt_width + tokens.shape[1] - 1)  # (n, W)
    hidden = model.model(
        input_ids=torch.cat([prompts.input_ids[which], tokens], 1).gather(1, shifted),
        position_ids=torch.cat([prompt_position, position.expand(3, -1, -1)], 2).gather(2, shifted.expand(3, -1, -1)),
        mm_encoder_outputs=select_figures(encode_figures(model, prompts), which.tolist()), use_cache=False)[0]
    states = hidden[(column >= prompt_length - 1) & (column < length - 1)]  # (N, H): each predicts the next token
    # Only a chunk of logits exists at a time: checkpoint drops it, and the backward pass makes it again.
    logprobs = torch.cat([checkpoint(token_logprobs, model.get_output_embeddings(), some, targets,
                                     policy.forbidden_ids, rollouts.temperature, use_reentrant=False)
                          for some, targets in zip(states.split(LOGIT_CHUNK), tokens[mask].split(LOGIT_CHUNK))])
    return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs)


def token_logprobs(head, hidden, tokens, forbidden_ids, temperature):
    """(N, H) states and (N,) tokens -> (N,) log-probabilities of the tokens."""
    return allowed_logprobs(head(hidden), forbidden_ids, temperature).gather(1, tokens[:, None])[:, 0]


@memory_phase("learning", "--tokens-per-micro-batch")
@torch.no_grad()
def frozen_logprobs(policy, prompts, rollouts, config, rows=None):
    """(len(rows), T) log-probabilities of rollouts (all, or `rows`) without gradients: of a teacher, or of the base."""
    policy.base.eval()
    rows = torch.arange(len(rollouts.tokens), device=policy.device) if rows is None else rows
    found = torch.zeros_like(rollouts.logprobs)
    for micro in micro_batches(prompts, rollouts, rows, config):
        found[micro] = completion_logprobs(policy, prompts, rollouts, micro)
    return found[rows]


def micro_batches(prompts, rollouts, rows, config):
    """Cuts `rows` (n,) into micro-batches of at most `tokens_per_micro_batch` tokens, padding included, at least a row.

    Rows of like length, prompt and completion, come together: they waste little padding.
    """
    budget, batches = config.tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH, []
    group_size = len(rollouts.tokens) // len(prompts.ids)
    lengths = (prompts.attention_mask.sum(-1).repeat_interleave(group_size) + rollouts.lengths).tolist()
    for row in sorted(rows.tolist(), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [torch.tensor(batch, device=rows.device) for batch in batches]


@memory_phase("learning", "--tokens-per-micro-batch")
def accumulate_gradients(policy, prompts, rollouts, advantages, rows, config, base_logprobs=None):
    """Adds the gradient of the reduced loss over `rows` to the adapter's -> (loss, (B*G, T) log-probabilities found).

    `advantages` is (B*G, T), and so is `base_logprobs`, which the KL term needs. The denominators are fixed before the
    micro-batches, so the way rows are cut into them changes nothing.
    """
    policy.base.train()  # activation checkpointing works in training mode only; nothing here has dropout
    weights = torch.zeros_like(rollouts.logprobs)
    weights[rows] = LOSS_REDUCTIONS[loss_reduction(config)](rollouts.mask[rows], rollouts.tokens.shape[1])
    found, total = torch.zeros_like(rollouts.logprobs), 0.0
    for micro in micro_batches(prompts, rollouts, rows, config):
        mask = rollouts.mask[micro]
        logprobs = completion_logprobs(policy, prompts, rollouts, micro)
        per_token = LOSS_FNS[config.loss_fn](logprobs, rollouts.logprobs[micro], advantages[micro], mask,
                                             **loss_bounds(config))
        if per_token.shape != logprobs.shape:
            raise UserError(f"--loss-fn {config.loss_fn} gives a loss of shape {tuple(per_token.shape)}; it must give "
                            f"one for each token, {tuple(logprobs.shape)}")
        if config.kl_coef:  # k3 estimate of KL(policy || base)
            away = log_ratio(base_logprobs[micro], logprobs)
            per_token = per_token + config.kl_coef * (away.exp() - 1 - away)
        loss = (per_token * weights[micro])[mask].sum()
        loss.backward()
        found[micro], total = logprobs.detach(), total + loss.item()
    return total, found


def update(policy, optimizer, prompts, rollouts, advantages, rows, config, base_logprobs=None):
    """Learns from the rollouts `rows`: `updates_per_rollout` passes, each over shuffled minibatches. Gives metrics.

    Means over the optimiser steps (of ratio_min and ratio_max the extremes), but for dlogp and *_first, which are of
    the first: only there is the learner still the policy that sampled, so that what differs is rounding alone. Loss,
    gradients and log-probabilities are checked before the optimiser is touched: NonFinite is raised, or with
    `--on-nonfinite skip` the minibatch left out and counted.
    """
    steps, nonfinite, dlogp = [], 0, None
    for _ in range(config.updates_per_rollout if len(rows) else 0):
        order = torch.randperm(len(rows)).to(rows.device) if config.minibatches > 1 else slice(None)
        for minibatch in rows[order].tensor_split(min(config.minibatches, len(rows))):
            loss, found = accumulate_gradients(policy, prompts, rollouts, advantages, minibatch, config, base_logprobs)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm or math.inf).item()
            mask, old = rollouts.mask[minibatch], rollouts.logprobs[minibatch]
            if not (math.isfinite(loss + norm) and (found[minibatch] + old)[mask].isfinite().all()):
                optimizer.zero_grad(set_to_none=True)
                nonfinite += 1
                if config.on_nonfinite == "skip":
                    continue
                raise NonFinite(f"loss {loss}, gradient norm {norm}: stopped before the adapter was touched; "
                                "--on-nonfinite skip leaves such a batch out", nonfinite_record(
                                    prompts, rollouts, minibatch, advantages, found, loss, norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if not steps:
                dlogp = (found[minibatch] - old)[mask].abs()
            steps.append({"trainer/loss_mean": loss, **loss_diagnostics(
                config.loss_fn, found[minibatch], old, advantages[minibatch], mask, **loss_bounds(config)),
                "trainer/grad_norm": norm})
    return update_metrics(steps, len(rows), nonfinite, dlogp)


# ---------------------------------------------------------------------------------------------------------- Loop


@dataclass
class Batch:
    """B questions with G graded completions each."""

    questions: list
    prompts: Prompts
    rollouts: Rollouts
    texts: list[str]  # B*G
    rewards: torch.Tensor  # (B, G), 1 for the right option
    sampling_seconds: float
    token_changes: dict = field(default_factory=dict)  # row -> what `--log-token-changes` adds to its record

    @property
    def degenerate(self):
        """(B,) bool: groups without a signal."""
        return degenerate_groups(self.rewards)


def draw_batch(policy, questions, config, progress=None):
    """Questions -> Batch: encode, sample, grade."""
    prompts = encode_prompts(policy.tokenizer, policy.image_processor, questions, config.max_image_tokens)
    started = time.perf_counter()
    rollouts = sample(policy, prompts.to(policy.device), config.group_size, config.max_tokens, config.temperature,
                      rollouts_at_once=config.rollouts_at_once, progress=progress)
    texts = completion_texts(policy, rollouts)
    seconds = time.perf_counter() - started
    labels = [question.label for question in questions for _ in range(config.group_size)]
    rewards = torch.tensor([grade(text, label) for text, label in zip(texts, labels)]).view(len(questions), -1)
    return Batch(questions, prompts, rollouts, texts, rewards, seconds)


def draw_informative_batch(policy, take, config, progress=None):
    """Dynamic sampling (DAPO, section 3.2): waves of questions until `batch_size` groups are informative, which means
    that their rewards are not all equal, or `max_candidate_multiplier` times as many were drawn.

    Each wave asks only for what is missing. Gives all the candidates as one Batch, and the number of waves.
    """
    waves, missing, left = [], config.batch_size, config.batch_size * config.max_candidate_multiplier
    while missing and left:
        waves.append(draw_batch(policy, take(min(missing, left)), config, progress))
        left -= len(waves[-1].questions)
        missing -= int((~waves[-1].degenerate).sum())
    return Batch([q for wave in waves for q in wave.questions], join_prompts([wave.prompts for wave in waves]),
                 join_rollouts([wave.rollouts for wave in waves]), [text for wave in waves for text in wave.texts],
                 torch.cat([wave.rewards for wave in waves]), sum(wave.sampling_seconds for wave in waves)), len(waves)


def distillation_advantages(policy, teacher, batch, config):
    """(B*G, T) advantages coef * (teacher logp - student's sampled logp), and their metric: no reward is needed.

    opsd: the teacher is the base policy that also reads the worked solution; opd: it is another model.
    """
    prompts = encode_prompts(teacher.tokenizer, teacher.image_processor, batch.questions, config.max_image_tokens,
                             with_solution=config.advantage == "opsd").to(policy.device)
    with policy.model.disable_adapter() if teacher is policy else contextlib.nullcontext():
        logprobs = frozen_logprobs(teacher, prompts, batch.rollouts, config)
    advantages = config.distill_coef * (logprobs - batch.rollouts.logprobs)
    return advantages, {"opd/reverse_kl_mean": (batch.rollouts.logprobs - logprobs)[batch.rollouts.mask].mean().item()}


def batch_advantages(policy, teacher, batch, config):
    """-> (B*G, T) advantages, (B, G) rewards with the length penalty, and metrics of a distillation."""
    rewards, rollouts = batch.rewards, batch.rollouts
    if config.advantage != "reward":
        advantages, metrics = distillation_advantages(policy, teacher, batch, config)
        return advantages, rewards, metrics
    if config.overlong_penalty:
        cache = config.overlong_cache or config.max_tokens // 4
        rewards = rewards + overlong_penalty(rollouts.lengths.cpu(), config.max_tokens, cache).view_as(rewards)
    advantages = group_advantages(rewards, config.normalize_std)  # (B, G)
    advantages = advantages.masked_fill(batch.degenerate[:, None], 0.0)  # only lengths differ: no signal
    return advantages.to(policy.device).reshape(-1, 1).expand_as(rollouts.logprobs), rewards, {}


def training_rows(batch, config):
    """The rows that have a gradient: those of groups with unequal rewards; with a KL term or a teacher, all."""
    trains = torch.ones_like(batch.rollouts.finished)
    if config.advantage == "reward" and not config.kl_coef:
        informative = ~batch.degenerate.to(trains.device)
        trains &= informative.repeat_interleave(config.group_size)
    if config.mask_truncated:
        trains &= batch.rollouts.finished
    return trains.nonzero()[:, 0]


def train_step(policy, optimizer, take, config, teacher=None, progress=None):
    """Sample, reward, compare, update, once. `take(n)` gives the next n questions. Gives metrics, Batch, advantages."""
    started, joules = time.perf_counter(), gpu_joules(policy.device)
    if config.dynamic_sampling:
        batch, waves = draw_informative_batch(policy, take, config, progress)
    else:
        batch, waves = draw_batch(policy, take(config.batch_size), config, progress), 1
    sampled, sampled_joules = time.perf_counter(), gpu_joules(policy.device)
    advantages, shaped, extra = batch_advantages(policy, teacher, batch, config)
    base_logprobs = None
    if config.kl_coef:
        with policy.model.disable_adapter():
            base_logprobs = frozen_logprobs(policy, batch.prompts, batch.rollouts, config)
        extra["trainer/base_kl_k1"] = (batch.rollouts.logprobs - base_logprobs)[batch.rollouts.mask].mean().item()
    learned = update(policy, optimizer, batch.prompts, batch.rollouts, advantages, training_rows(batch, config), config,
                     base_logprobs)
    ended, energy = time.perf_counter(), step_energy(joules, sampled_joules, gpu_joules(policy.device))
    if config.log_token_changes:
        batch.token_changes = token_changes(policy, batch, config)
    seconds = {"time/sampling": batch.sampling_seconds, "time/learning": ended - sampled,
               "time/rest": time.perf_counter() - ended + sampled - started - batch.sampling_seconds}
    return batch_metrics(batch, shaped, waves) | extra | learned | seconds | energy, batch, advantages


def token_changes(policy, batch, config):
    """row -> its tokens' log-probabilities after the update minus before: `log_token_changes` groups, unequal first."""
    groups = batch.degenerate.int().argsort(stable=True)[:config.log_token_changes]
    rows = torch.arange(len(batch.texts)).view(batch.rewards.shape)[groups].flatten()
    rollouts, found = batch.rollouts, {}
    after = frozen_logprobs(policy, batch.prompts, rollouts, config, rows.to(policy.device))
    changes = (after - rollouts.logprobs[rows]).tolist()
    for row, change, tokens, length in zip(rows.tolist(), changes, rollouts.tokens[rows].tolist(),
                                           rollouts.lengths[rows].tolist()):
        found[row] = {"token_changes": [round(value, 4) for value in change[:length]],
                      "token_texts": token_texts(policy.tokenizer, tokens[:length])}
    return found


def completion_texts(policy, rollouts):
    """The completions as text, without the stop token and what follows."""
    return [policy.tokenizer.decode(row[:length], skip_special_tokens=True)
            for row, length in zip(rollouts.tokens.tolist(), rollouts.lengths.tolist())]


def train(config):
    """Trains as `config` says and gives the run directory's path. Raises UserError for what a user can mend."""
    config = with_preset(config)
    run, policy, teacher, train_questions, test_questions = prepare(config, with_train=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    with run:  # what ends it early leaves the last complete step as a checkpoint
        start = "adapter" if config.adapter else "base"
        before = evaluate_policy(policy, test_questions, config, run, start) if config.evaluate else None
        torch.manual_seed(config.seed)  # the draws do not depend on whether an evaluation ran
        done, drawn = run.restore(policy, optimizer)  # 0, 0 but for --resume
        order = (train_questions[i % len(train_questions)] for i in itertools.count(drawn))

        def take(count):
            return list(itertools.islice(order, count))

        with tqdm(total=config.steps, initial=done, desc="steps", disable=None) as bar:
            for step in range(done + 1, config.steps + 1):
                with sampling_bar(config) as progress:
                    metrics, batch, advantages = train_step(policy, optimizer, take, config, teacher, progress)
                run.save_step(step, metrics, batch, advantages)
                if step == config.steps or (config.save_every and step % config.save_every == 0):
                    run.checkpoint()
                    write_report(run.path)
                bar.update()
        end = f"step-{config.steps}"
        after = evaluate_policy(policy, test_questions, config, run, end) if config.evaluate else None
        run.finish(before, after)
    write_report(run.path)
    return run.path


def load_teacher(policy, config):
    """The teacher of a distillation: None, the policy itself with its adapter off, or another model."""
    if config.advantage != "opd":
        return policy if config.advantage == "opsd" else None
    teacher = load_frozen(config.teacher_model, "", config)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(f"--teacher-model {config.teacher_model} has another tokenizer than {config.base_model}")
    return teacher


def prepare(config, with_train):
    """What both train and evaluate need -> (run directory, policy, teacher, training questions, test questions).

    What is not needed is None.
    The cheap checks come first: a wrong flag or data set is told before gigabytes of weights are fetched.
    """
    check_config(config, LOSS_FNS)
    pick_device(config.device)
    path = free_run_path(config)
    train_questions = test_questions = None
    if with_train:
        train_questions = load_geoqa(config.dataset, "train", seed=config.seed, max_samples=config.max_samples,
                                     revision=config.dataset_revision)
        if config.advantage == "opsd":
            check_solutions(train_questions)
    if config.evaluate or not with_train:
        test_questions = load_geoqa(config.dataset, config.eval_split, test_size=config.test_size,
                                    revision=config.dataset_revision)
    policy = load_policy(config)
    teacher = load_teacher(policy, config) if with_train else None
    context = policy.base.config.text_config.max_position_embeddings
    if config.max_tokens >= context:
        raise UserError(f"--max-tokens {config.max_tokens} exceeds the model's context of {context}")
    config.lora_rank = policy.model.peft_config["default"].r  # with --adapter it is the adapter's
    if policy.device.type == "cuda":
        fit_memory(sys.modules[__name__], policy, train_questions or test_questions, config)
    run = RunDir(path, config, policy.revision, (train_questions or test_questions).revision)
    for questions in (train_questions, test_questions):
        run.tell(questions.notes if questions else [])
    if with_train and config.batch_size > len(train_questions):
        run.tell([f"{len(train_questions)} training questions are fewer than --batch-size: a step repeats some"])
    return run, policy, teacher, train_questions, test_questions


def evaluate_policy(policy, questions, config, run, name):
    """Answers `questions` (greedy by default), writes `eval-NAME.json` and gives its rows, one dict a question."""
    if records := run.read_json(f"eval-{name}.json"):
        return records  # made before the run was interrupted
    torch.manual_seed(config.seed)
    records, meter = [], Meter(policy.device)
    with tqdm(total=len(questions), desc=f"evaluating {name}", disable=None) as bar:
        for first in range(0, len(questions), config.eval_batch_size):
            batch = [questions[i] for i in range(first, min(first + config.eval_batch_size, len(questions)))]
            prompts = encode_prompts(policy.tokenizer, policy.image_processor, batch, config.max_image_tokens)
            run.tell(prompts.downsized)
            with sampling_bar(config) as progress:
                rollouts = sample(policy, prompts.to(policy.device), 1, config.max_tokens, config.eval_temperature,
                                  config.top_p, config.rollouts_at_once, progress)
            records += run.evaluation_records(batch, completion_texts(policy, rollouts), rollouts)
            bar.update(len(batch))
    run.save_evaluation(name, records, meter.evaluation())
    return records


def sampling_bar(config):
    """The bar inside a step: tokens so far, rows unfinished. `disable=None` keeps it quiet without a terminal."""
    return tqdm(total=config.max_tokens, desc="sampling", unit="token", leave=False, disable=None)


def evaluate(config):
    """Evaluates the base policy, or the one with `--adapter`; gives the summary that `results.json` holds."""
    config = dataclasses.replace(config)  # prepare completes it
    run, policy, _, _, questions = prepare(config, with_train=False)
    records = evaluate_policy(policy, questions, config, run, "adapter" if config.adapter else "base")
    results = run.finish(None, records) if config.adapter else run.finish(records, None)
    write_report(run.path)
    return results


def main(config):
    if config.plan:
        config = with_preset(config)
        check_config(config, LOSS_FNS)
        return print(plan_text(sys.modules[__name__], config))
    return evaluate(config) if config.eval_only else train(config)


if __name__ == "__main__":
    run_command_line(Config, main)
