"""Vision GRPO on one GPU: teaches a vision-language model geometry by reinforcement learning.

    python grpo.py                       # Qwen3.5-4B on GeoQA, one 24 GB card
    python demo.py                       # the same code on a tiny model and drawn figures, any machine

Each step draws G completions for each of B questions, rewards a right final \\boxed{letter} with 1, and makes the
completions that beat their group's mean more likely (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1).

Where this differs from the paper, and why:
 1. The advantage is reward - mean. The paper also divides by the group's standard deviation (`--normalize-std`); the
    experiment reproduced here does not, and dividing weighs nearly solved and nearly hopeless questions up.
 2. One update a batch, so no clipping: the loss is -ratio * advantage with ratio = exp(logp - old_logp), which is 1 up
    to rounding. `old_logp` is what the sampler gave the token when it drew it.
 3. No KL term to a reference model, as in the experiment reproduced here.
 4. The mean runs over all completion tokens of the step. The paper takes it within each row first, which makes a token
    of a long wrong answer count less than one of a short wrong answer.
 5. Groups whose rewards are all equal have no signal: they are skipped and counted.
 6. The policy is a 4-bit base with a LoRA adapter, and image tokens cannot be drawn: sampler and learner both take the
    softmax over the remaining vocabulary.
"""

import argparse
import functools
import logging
import math
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from geoqa import load_geoqa
from hub import UserError, hub_folder
from reward import extract_choice, grade
from rundir import RunDir, compare, describe, free_run_path, peak_memory_gib, results_table
from vision_tokens import IMAGE_TOKEN, encode_figures, encode_prompts, prompt_positions, select_figures

SUPPORTED_MODELS = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "qwen2_vl")
LOGIT_CHUNK = 256  # tokens whose logits exist at once in the learner: 256 x 248,320 x 4 bytes is 0.25 GB


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

    steps: int = flag(100, "training steps, one update each")
    batch_size: int = flag(8, "questions a step")
    group_size: int = flag(8, "completions a question")
    max_tokens: int = flag(1024, "most new tokens of a completion, in training and evaluation")
    temperature: float = flag(1.0, "softmax temperature of the rollouts")
    top_p: float = flag(1.0, "nucleus of a sampled evaluation; training needs 1")
    lora_rank: int = flag(32, "rank of the adapter; alpha equals it")
    learning_rate: float = flag(4e-5, "AdamW's, constant")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm; 0: never")
    loss_fn: str = flag("importance_sampling", "per-token loss, a name in LOSS_FNS")
    normalize_std: bool = flag(False, "divide advantages by the group's standard deviation")
    seed: int = flag(42, "of the training order, the adapter's start and the draws; never of the test set")

    device: str = flag("auto", "auto: the CUDA GPU; or cuda, cuda:1, cpu")
    quantization: Literal["auto", "nf4", "none"] = flag("auto", "4-bit base; auto: nf4 on CUDA, none on a CPU")
    activation_checkpointing: Literal["auto", "on", "off"] = flag("auto", "recompute layers; auto: on CUDA only")
    micro_batch_size: int = flag(4, "completions in one forward and backward pass")

    evaluate: bool = flag(True, "evaluate before and after training")
    eval_only: bool = flag(False, "evaluate, train nothing")
    eval_split: Literal["test", "dev"] = flag("test", "split of the evaluation questions")
    test_size: int = flag(100, "evaluation questions, always the same; 0: the whole test split")
    eval_batch_size: int = flag(32, "questions decoded at once in evaluation")
    eval_temperature: float = flag(0.0, "softmax temperature of evaluation; 0: greedy")

    save_every: int = flag(25, "steps between adapter checkpoints; 0: only the last")
    show_samples: bool = flag(False, "print one group of completions each step")
    experiment_name: str = flag("", "name of the run's folder; empty: the policy's name and a number")
    output_dir: str = flag("runs", "folder of the run folders")


def check_config(config):
    """Raises UserError, naming the flag, for a value with which no run makes sense."""
    for name in ("batch_size", "max_tokens", "lora_rank", "micro_batch_size", "eval_batch_size", "steps"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}")
    for name in ("max_samples", "max_image_tokens", "test_size", "save_every", "max_grad_norm", "learning_rate",
                 "eval_temperature"):
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(config, name)}")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, not {config.top_p}")
    if not config.eval_only:
        if config.group_size < 2:
            raise UserError(f"--group-size must be at least 2, not {config.group_size}: the advantage compares a "
                            "completion with the others of its group")
        if not 0 < config.temperature < math.inf:
            raise UserError(f"--temperature must be above 0 in training, not {config.temperature}: a group of equal "
                            "completions teaches nothing")
        if config.top_p < 1:
            raise UserError("--top-p below 1 is for --eval-only: training needs the probabilities of the full softmax")
    if config.loss_fn not in LOSS_FNS:
        raise UserError(f"--loss-fn {config.loss_fn} is none of {', '.join(LOSS_FNS)}")


# ---------------------------------------------------------------------------------------------------------- Policy


@dataclass
class Policy:
    """A frozen base with a trainable LoRA adapter, and what turns text and figures into its input."""

    model: object  # peft.PeftModel
    tokenizer: object
    image_processor: object
    stop_ids: torch.Tensor  # tokens that end a completion
    forbidden_ids: torch.Tensor  # image tokens: probability 0 in the sampler and in the learner
    revision: str = "local"

    @property
    def base(self):
        """The transformers model; PEFT has put the adapter's layers into it."""
        return self.model.get_base_model()

    @property
    def device(self):
        return self.base.device

    def parameters(self):
        return [p for p in self.model.parameters() if p.requires_grad]


def load_policy(config):
    """Config -> Policy. On CUDA an NF4 base in bf16, on a CPU a float32 base; the adapter is float32 on both.

    Raises UserError where there is no GPU, no such model, or a model that is not one of SUPPORTED_MODELS.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    device = pick_device(config.device)
    quiet_libraries(device)
    folder, revision = hub_folder(config.base_model, "model", config.model_revision,
                                  ["*.json", "*.safetensors", "*.txt", "*.jinja"])
    try:
        model_config = AutoConfig.from_pretrained(folder)
        if model_config.model_type not in SUPPORTED_MODELS:
            raise UserError(f"--base-model {config.base_model} is a {model_config.model_type} model; supported are the "
                            f"vision-language families {', '.join(SUPPORTED_MODELS)}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        check_fit(config.base_model, model_config, tokenizer, image_processor)
        torch.manual_seed(config.seed)  # the adapter's start
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        nf4 = config.quantization == "nf4" or (config.quantization == "auto" and device.type == "cuda")
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, device_map={"": device},
                                                           quantization_config=nf4_config(dtype) if nf4 else None)
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise UserError(f"--base-model {config.base_model} cannot be loaded: {describe(error)}") from error
    if device.type == "cpu":
        keep_nf4_differentiable(base)
    if config.activation_checkpointing == "on" or (config.activation_checkpointing == "auto" and device.type == "cuda"):
        base.activation_checkpointing_enable()
    stop_ids = base.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(stop_ids if isinstance(stop_ids, list) else [stop_ids])} - {None}
    forbidden_ids = {getattr(model_config, name, None) for name in (
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")} - {None}
    return Policy(add_lora(base, config), tokenizer, image_processor, torch.tensor(sorted(stop_ids), device=device),
                  torch.tensor(sorted(forbidden_ids), device=device), revision)


def quiet_libraries(device):
    """Switches off what libraries print and nobody can act on, so that the program's own lines stand out."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft calls it by its old name
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # an optional CPU kernel that is not installed
    if device.type == "cpu":
        transformers.logging.set_verbosity_error()  # tells to install CUDA kernels
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()


def pick_device(name):
    """"auto", "cuda", "cuda:1" or "cpu" -> torch.device; UserError where it is not there."""
    try:
        device = torch.device("cuda" if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"--device {name} is none of auto, cuda, cuda:N, cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA GPU here: run `python demo.py` to see it learn on a CPU, or add `--device cpu`")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise UserError(f"--device {name}: only {torch.cuda.device_count()} CUDA GPU(s) here")
        torch.cuda.set_device(device)  # where kernels of other libraries run
    return device


def check_fit(name, model_config, tokenizer, image_processor):
    """Raises UserError where tokenizer or image processor do not belong to the model."""
    vision = model_config.vision_config
    for ours, theirs in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"),
                         ("temporal_patch_size", "temporal_patch_size")):
        if getattr(image_processor, ours) != getattr(vision, theirs):
            raise UserError(f"{name}: {ours} is {getattr(image_processor, ours)} in preprocessor_config.json and "
                            f"{getattr(vision, theirs)} in config.json")
    if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != model_config.image_token_id:
        raise UserError(f"{name}: {IMAGE_TOKEN} is token {tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)} of the tokenizer "
                        f"and {model_config.image_token_id} in config.json")


def nf4_config(compute_dtype):
    """4-bit NF4 with double quantisation (QLoRA, arXiv 2305.14314) for the language model's linear layers."""
    # Naming any module drops the default protection of lm_head, and "visual" alone would not match "model.visual".
    # in_proj_a and in_proj_b are tiny gates of the recurrent layers, very sensitive to 4-bit.
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["lm_head", "model.visual", "in_proj_a", "in_proj_b"])


def keep_nf4_differentiable(model):
    """On CPUs with avx512_bf16 bitsandbytes repacks 4-bit weights at the first rollout, for an op without autograd."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


# Every linear layer of the language model but the tiny gates: attention, gated delta net, MLP. None of the vision tower.
LORA_MODULES = (r".*language_model\.layers\.\d+\."
                r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|mlp\.(gate|up|down)_proj)")


def add_lora(base, config):
    """Puts a float32 LoRA adapter (arXiv 2106.09685) into the frozen base: a new one, or the one in --adapter."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if config.adapter:
        if not (Path(config.adapter) / "adapter_model.safetensors").is_file():
            raise UserError(f"--adapter {config.adapter}: no adapter_model.safetensors there")
        try:
            model = PeftModel.from_pretrained(base, config.adapter, is_trainable=True)
        except (OSError, ValueError, LookupError, RuntimeError, TypeError, SafetensorError) as error:
            raise UserError(f"--adapter {config.adapter} cannot be put on {config.base_model}: "
                            f"{describe(error)}") from error
    else:
        model = get_peft_model(base, LoraConfig(r=config.lora_rank, lora_alpha=config.lora_rank, lora_dropout=0.0,
                                                target_modules=LORA_MODULES))
    # In bf16 a step of 4e-5 leaves many weights as they were; from_pretrained has no reason to agree on its own.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.peft_config["default"].base_model_name_or_path = config.base_model  # not this machine's cache folder
    return model


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


@torch.no_grad()
def sample(policy, prompts, group_size, max_tokens, temperature=1.0, top_p=1.0, progress=None):
    """Draws `group_size` completions of at most `max_tokens` tokens for each prompt -> Rollouts.

    Temperature 0 decodes greedily (logprobs are then those at temperature 1); top_p < 1 draws from the nucleus but
    still reports logprobs of the full softmax. Both are for evaluation. `progress` is a tqdm bar or None.
    Raises UserError where prompt and completion together exceed the model's context.
    """
    model = policy.base.eval()
    context = model.config.text_config.max_position_embeddings
    if prompts.input_ids.shape[1] + max_tokens > context:
        raise UserError(f"a prompt of {prompts.input_ids.shape[1]} tokens and --max-tokens {max_tokens} exceed the "
                        f"model's context of {context}")
    rows = prompts.input_ids.shape[0] * group_size
    shape, device = (rows, max_tokens), policy.device
    rollouts = Rollouts(torch.full(shape, policy.tokenizer.pad_token_id, device=device),
                        torch.zeros(shape, device=device), torch.zeros(shape, device=device),
                        torch.zeros(rows, dtype=torch.long, device=device),
                        torch.zeros(rows, dtype=torch.bool, device=device), temperature)
    decode = functools.partial(decode_groups, policy=policy, prompts=prompts, rollouts=rollouts, top_p=top_p,
                               progress=progress)
    features = encode_figures(model, prompts)
    model.generate(
        prompts.input_ids, attention_mask=prompts.attention_mask, position_ids=prompt_positions(model, prompts),
        mm_encoder_outputs=select_figures(features, range(len(prompts.ids))), custom_generate=decode, do_sample=False,
        num_beams=1, num_return_sequences=1, max_new_tokens=max_tokens, pad_token_id=policy.tokenizer.pad_token_id)
    return rollouts


def decode_groups(model, input_ids, policy, prompts, rollouts, top_p, progress, **prepared):
    """The decode loop, called by `model.generate` with the cache and inputs that it has prepared; fills `rollouts`."""
    for unused in ("logits_processor", "stopping_criteria", "generation_config"):
        prepared.pop(unused)  # top-k 20 and top-p 0.95 of the model's folder among them: they would skew logprobs
    outputs = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **prepared))
    cache, device = outputs.cache, input_ids.device
    prompt_width, (total, max_tokens) = input_ids.shape[1], rollouts.tokens.shape

    # Each prompt was prefilled once; its cache, last logits, mask and position now serve G rows.
    expand = torch.arange(len(input_ids), device=device).repeat_interleave(total // len(input_ids))
    cache.reorder_cache(expand)
    logits = outputs.logits[expand, -1]  # (rows, V)
    attention_mask = F.pad(prompts.attention_mask[expand], (0, max_tokens), value=1)  # (rows, P + T)
    position = next_position(prompt_positions(model, prompts))[expand]  # (rows,)
    row = torch.arange(total, device=device)  # which rollout a live row writes to
    alive = torch.ones(total, dtype=torch.bool, device=device)
    # Looking for finished rows makes a GPU wait for its queue; a CPU loses nothing by looking each time.
    check_every = 16 if device.type == "cuda" else 1

    for t in range(max_tokens):
        logprobs = allowed_logprobs(logits, policy.forbidden_ids, rollouts.temperature)  # (rows, V)
        token = draw(logprobs, rollouts.temperature, top_p)  # (rows,)
        token = torch.where(alive, token, policy.tokenizer.pad_token_id)
        rollouts.tokens[row, t] = token
        rollouts.logprobs[row, t] = logprobs.gather(1, token[:, None])[:, 0] * alive
        rollouts.entropies[row, t] = torch.special.entr(logprobs.exp()).sum(-1) * alive
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
        logits = model(input_ids=token[:, None], attention_mask=attention_mask[:, :prompt_width + t + 1],
                       position_ids=(position + t).expand(3, -1)[..., None], cache=cache, use_cache=True,
                       logits_to_keep=1).logits[:, -1]


def next_position(positions):
    """(3, B, P) -> (B,) position of a completion's first token. Not the length: a figure takes fewer than its tokens."""
    return positions[:, :, -1].amax(0) + 1


def allowed_logprobs(logits, forbidden_ids, temperature):
    """(..., V) logits -> float32 log-softmax at `temperature` (0: at 1) over all but the forbidden tokens."""
    logits = logits.float().index_fill(-1, forbidden_ids, -math.inf)
    return (logits / (temperature or 1.0)).log_softmax(-1)


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


def group_advantages(rewards, normalize_std=False):
    """(B, G) rewards -> (B, G) advantages: reward - group mean, and with `normalize_std` over the group's deviation.

    Exactly 0 for a group whose rewards are all equal, where rounding of the mean would leave noise, and dividing by a
    deviation near 0 would blow it up. Formula: arXiv 2402.03300, section 4.1.2.
    """
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalize_std:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-8)
    return advantages.masked_fill(degenerate_groups(rewards)[:, None], 0.0)


def degenerate_groups(rewards):
    """(B, G) -> (B,) bool: all rewards of the group are equal."""
    return (rewards == rewards[:, :1]).all(1)


# ---------------------------------------------------------------------------------------------------------- Losses


def importance_sampling(logprobs, old_logprobs, advantages, mask):
    """-ratio * advantage with ratio = exp(logp - old_logp); its gradient at ratio 1 is REINFORCE's."""
    return -(logprobs - old_logprobs).exp() * advantages


# name -> function of (n, T) logprobs, old_logprobs, advantages, mask and keyword bounds, giving (n, T) per-token losses.
# What it gives outside the mask is ignored. The one place to add a loss.
LOSS_FNS = {"importance_sampling": importance_sampling}


# ---------------------------------------------------------------------------------------------------------- Learner


def completion_logprobs(policy, prompts, rollouts, rows):
    """(len(rows), T) log-probabilities with gradients of the rollouts `rows` (ints) under the policy as it is now.

    One teacher-forced forward pass over prompt and completion, at `rollouts.temperature` and over the same allowed
    vocabulary as the sampler. 0 beyond a row's length.
    """
    model = policy.base
    rows = torch.as_tensor(rows, device=policy.device)
    which = rows // (len(rollouts.tokens) // len(prompts.ids))  # the prompt of each row
    longest = int(rollouts.lengths[rows].max())
    start = int(prompts.attention_mask[which].argmax(-1).min())  # padding that all these rows share
    mask, tokens = rollouts.mask[rows, :longest], rollouts.tokens[rows, :longest]
    prompt_position = prompt_positions(model, prompts)[:, which]  # (3, n, P)
    position = next_position(prompt_position)[:, None] + torch.arange(longest, device=policy.device)  # (n, longest)
    hidden = model.model(
        input_ids=torch.cat([prompts.input_ids[which, start:], tokens], 1),
        attention_mask=torch.cat([prompts.attention_mask[which, start:], mask.long()], 1),
        position_ids=torch.cat([prompt_position[:, :, start:], position.expand(3, -1, -1)], 2),
        mm_encoder_outputs=select_figures(encode_figures(model, prompts), which.tolist()), use_cache=False,
    )[0][:, -longest - 1:-1]  # (n, longest, H): the state that predicts each completion token
    # Only a chunk of logits exists at a time: checkpoint drops it, and the backward pass makes it again.
    chunks = zip(hidden[mask].split(LOGIT_CHUNK), tokens[mask].split(LOGIT_CHUNK))
    logprobs = torch.cat([checkpoint(token_logprobs, model.get_output_embeddings(), states, targets,
                                     policy.forbidden_ids, rollouts.temperature, use_reentrant=False)
                          for states, targets in chunks])
    padded = logprobs.new_zeros(len(rows), rollouts.tokens.shape[1])
    return padded.masked_scatter(rollouts.mask[rows], logprobs)


def token_logprobs(head, hidden, tokens, forbidden_ids, temperature):
    """(N, H) states and (N,) tokens -> (N,) log-probabilities of the tokens."""
    return allowed_logprobs(head(hidden), forbidden_ids, temperature).gather(1, tokens[:, None])[:, 0]


def accumulate_gradients(policy, prompts, rollouts, advantages, rows, config):
    """Adds the gradient of the mean per-token loss over `rows` to the adapter's; gives loss and |dlogp| metrics.

    `advantages` is (B*G, T). The denominator is fixed before the micro-batches, so the way they are cut changes
    nothing. |dlogp| compares the sampler's log-probabilities with the learner's: 0 but for rounding.
    """
    policy.base.train()  # activation checkpointing works in training mode only; nothing here has dropout
    rows = rows[rollouts.lengths[rows].argsort(stable=True)]  # rows of like length waste little padding
    total_tokens = rollouts.lengths[rows].sum()
    loss_sum, dlogp_sum, dlogp_max = 0.0, 0.0, 0.0
    for micro in rows.split(config.micro_batch_size):
        mask, old_logprobs = rollouts.mask[micro], rollouts.logprobs[micro]
        logprobs = completion_logprobs(policy, prompts, rollouts, micro)
        per_token = LOSS_FNS[config.loss_fn](logprobs, old_logprobs, advantages[micro], mask)  # (n, T)
        loss = per_token[mask].sum() / total_tokens
        loss.backward()
        dlogp = (logprobs.detach() - old_logprobs)[mask].abs()
        loss_sum, dlogp_sum = loss_sum + loss.item(), dlogp_sum + dlogp.sum().item()
        dlogp_max = max(dlogp_max, dlogp.max().item())
    return {"trainer/loss_mean": loss_sum, "trainer/dlogp_mean": dlogp_sum / total_tokens.item(),
            "trainer/dlogp_max": dlogp_max}


def update(policy, optimizer, prompts, rollouts, advantages, degenerate, config):
    """One optimiser step on the groups that are not degenerate. Gives metrics, None where there was no update."""
    group_size = len(rollouts.tokens) // len(prompts.ids)
    rows = (~degenerate).repeat_interleave(group_size).nonzero()[:, 0]
    if len(rows) == 0:
        return {"train_datums": 0, "trainer/loss_mean": None, "trainer/dlogp_mean": None, "trainer/dlogp_max": None,
                "trainer/grad_norm": None}
    advantages = advantages.reshape(-1, 1).expand_as(rollouts.logprobs)  # GRPO gives each token its row's number
    metrics = accumulate_gradients(policy, prompts, rollouts, advantages, rows, config)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm or math.inf).item()
    if not math.isfinite(norm):
        raise UserError(f"the gradient norm is {norm}: stopped before the adapter was touched; try a smaller "
                        "--learning-rate, and go on from the last checkpoint with --adapter")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"train_datums": len(rows), **metrics, "trainer/grad_norm": norm}


# ---------------------------------------------------------------------------------------------------------- Loop


def train_step(policy, optimizer, questions, config, progress=None):
    """Sample, reward, compare, update, for one batch of questions. Gives the step's metrics and rollout records."""
    started = time.perf_counter()
    prompts = encode_prompts(policy.tokenizer, policy.image_processor, questions, config.max_image_tokens)
    prompts = prompts.to(policy.device)
    sampling = time.perf_counter()
    rollouts = sample(policy, prompts, config.group_size, config.max_tokens, config.temperature, progress=progress)
    texts = completion_texts(policy, rollouts)
    learning = time.perf_counter()
    labels = [question.label for question in questions for _ in range(config.group_size)]
    rewards = torch.tensor([grade(text, label) for text, label in zip(texts, labels)]).view(len(questions), -1)  # (B, G)
    advantages, degenerate = group_advantages(rewards, config.normalize_std), degenerate_groups(rewards)
    metrics = update(policy, optimizer, prompts, rollouts, advantages.to(policy.device), degenerate.to(policy.device),
                     config)
    ended = time.perf_counter()

    choices = [extract_choice(text) for text in texts]
    tokens = rollouts.lengths.sum().item()
    metrics = {
        "reward": rewards.mean().item(),
        "format_rate": sum(choice is not None for choice in choices) / len(choices),
        "degenerate_fraction": degenerate.float().mean().item(),
        "rollout/completion_tokens_mean": tokens / len(texts),
        "rollout/truncated_fraction": 1 - rollouts.finished.float().mean().item(),
        "rollout/entropy": rollouts.entropies.sum().item() / tokens,
        "rollout/downsized_figures": len(prompts.downsized),
        **metrics,
        "time/sampling": learning - sampling, "time/learning": ended - learning, "time/rest": sampling - started,
        "rate/tokens_per_second": tokens / (learning - sampling), "memory/peak_gib": peak_memory_gib(policy.device)}
    records = [{"question": questions[i // config.group_size].id, "tokens": row[:length], "text": text,
                "choice": choice, "reward": reward, "advantage": advantage, "length": length, "truncated": not done}
               for i, (row, length, text, choice, reward, advantage, done) in enumerate(zip(
                   rollouts.tokens.tolist(), rollouts.lengths.tolist(), texts, choices, rewards.flatten().tolist(),
                   advantages.flatten().tolist(), rollouts.finished.tolist()))]
    return metrics, records, prompts.downsized


def completion_texts(policy, rollouts):
    """The completions as text, without the stop token and what follows."""
    return [policy.tokenizer.decode(row[:length], skip_special_tokens=True)
            for row, length in zip(rollouts.tokens.tolist(), rollouts.lengths.tolist())]


def train(config):
    """Trains as `config` says and gives the run directory's path. Raises UserError for what a user can mend."""
    run, policy, train_questions, test_questions = prepare(config, with_train=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    before = evaluate_policy(policy, test_questions, config, run, "base") if config.evaluate else None
    torch.manual_seed(config.seed)  # the draws do not depend on whether an evaluation ran
    with tqdm(total=config.steps, desc="steps", disable=None) as bar:
        for step in range(1, config.steps + 1):
            first = (step - 1) * config.batch_size
            questions = [train_questions[i % len(train_questions)] for i in range(first, first + config.batch_size)]
            with sampling_bar(config) as progress:
                metrics, records, downsized = train_step(policy, optimizer, questions, config, progress)
            run.tell(downsized)
            run.save_step(step, metrics, records, questions)
            run.show_step(step, metrics, records[:config.group_size] if config.show_samples else [])
            if step == config.steps or (config.save_every and step % config.save_every == 0):
                policy.model.save_pretrained(run.path / f"step-{step}", save_embedding_layers=False)
            bar.update()
    if config.evaluate:
        after = evaluate_policy(policy, test_questions, config, run, f"step-{config.steps}")
        results = compare(before, after)
        run.write_json("results.json", results)
        print(results_table(results))
    print(f"run directory: {run.path}")
    return run.path


def prepare(config, with_train):
    """What both train and evaluate need -> (run directory, policy, training questions or None, test questions or None).

    The cheap checks come first: a wrong flag or data set is told before gigabytes of weights are fetched.
    """
    if Version(transformers.__version__) < Version("5.24"):
        raise UserError(f"transformers {transformers.__version__} is too old, 5.24 is needed: older ones give wrong "
                        "numbers for padded batches without any error; pip install -U -r requirements.txt")
    check_config(config)
    pick_device(config.device)
    path = free_run_path(config)
    train_questions = test_questions = None
    if with_train:
        train_questions = load_geoqa(config.dataset, "train", seed=config.seed, max_samples=config.max_samples,
                                     revision=config.dataset_revision)
    if config.evaluate or not with_train:
        test_questions = load_geoqa(config.dataset, config.eval_split, test_size=config.test_size,
                                    revision=config.dataset_revision)
    policy = load_policy(config)
    run = RunDir(path, config, policy.revision, (train_questions or test_questions).revision)
    for questions in (train_questions, test_questions):
        run.tell(questions.notes if questions else [])
    return run, policy, train_questions, test_questions


def evaluate_policy(policy, questions, config, run, name):
    """Answers `questions` (greedy by default), writes `eval-NAME.json` and gives its rows, one dict a question."""
    torch.manual_seed(config.seed)
    records = []
    with tqdm(total=len(questions), desc=f"evaluating {name}", disable=None) as bar:
        for first in range(0, len(questions), config.eval_batch_size):
            batch = [questions[i] for i in range(first, min(first + config.eval_batch_size, len(questions)))]
            prompts = encode_prompts(policy.tokenizer, policy.image_processor, batch, config.max_image_tokens)
            run.tell(prompts.downsized)
            with sampling_bar(config) as progress:
                rollouts = sample(policy, prompts.to(policy.device), 1, config.max_tokens, config.eval_temperature,
                                  config.top_p, progress)
            for question, text, length, done in zip(batch, completion_texts(policy, rollouts),
                                                    rollouts.lengths.tolist(), rollouts.finished.tolist()):
                records.append({"question": question.id, "gold": question.label, "choice": extract_choice(text),
                                "lenient_choice": extract_choice(text, lenient=True), "text": text, "tokens": length,
                                "truncated": not done})
                run.store_question(question)
            bar.update(len(batch))
    run.write_json(f"eval-{name}.json", records)
    return records


def sampling_bar(config):
    """The bar inside a step: tokens so far, rows unfinished. `disable=None` keeps it quiet where there is no terminal."""
    return tqdm(total=config.max_tokens, desc="sampling", unit="token", leave=False, disable=None)


def evaluate(config):
    """Evaluates the base policy, or the one with `--adapter`; gives the summary that `results.json` holds."""
    run, policy, _, questions = prepare(config, with_train=False)
    records = evaluate_policy(policy, questions, config, run, "adapter" if config.adapter else "base")
    results = compare(None, records) if config.adapter else compare(records, None)
    run.write_json("results.json", results)
    print(results_table(results))
    print(f"run directory: {run.path}")
    return results


# ---------------------------------------------------------------------------------------------------------- Command line


class OneLineParser(transformers.HfArgumentParser):
    """The dataclass is the command line. A wrong flag is one line and exit code 2."""

    def error(self, message):
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)


def run_command_line(config_class, action, argv=None):
    """Parses the flags into `config_class` and calls `action(config)`; a UserError becomes one line and exit code 2."""
    parser = OneLineParser(config_class, allow_abbrev=False, description=sys.modules[config_class.__module__].__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    config, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        parser.error(f"unknown flag {unknown[0]}")
    try:
        action(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError:
        print("error: out of GPU memory: lower --micro-batch-size (learning), --batch-size or --max-tokens (sampling), "
              "--eval-batch-size (evaluation); checkpoints already written are good", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: checkpoints already written are good, --adapter goes on from one", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run_command_line(Config, lambda config: evaluate(config) if config.eval_only else train(config))
