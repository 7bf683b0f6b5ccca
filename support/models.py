"""Models from a folder or the hub: device, 4-bit, the LoRA adapter, and whether the parts fit. Nothing of GRPO."""

import importlib
import inspect
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open

from support.branching import BRANCHING, take_branches
from support.errors import UserError, describe
from support.hub import hub_folder, parse_id
from support.kv_cache import one_token_convolution, one_token_delta_rule
from vision_tokens import IMAGE_TOKEN, template_ids

SUPPORTED_MODELS = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "qwen2_vl")
KERNELS = {  # function of the model's module -> package that may have put a kernel there
    "torch_chunk_gated_delta_rule": "fla", "torch_recurrent_gated_delta_rule": "fla",
    "causal_conv1d_fn": "causal_conv1d", "causal_conv1d_update": "causal_conv1d"}
ONE_TOKEN = {"torch_recurrent_gated_delta_rule": one_token_delta_rule, "causal_conv1d_update": one_token_convolution}
INSTALLED = {}  # (module, function) -> what transformers has found, before the torch reference was put in its place


def load_base(name, device, quantization="auto", fused=True):
    """-> (frozen model in eval mode that takes `branches`, tokenizer, image processor, resolved revision).

    `quantization`: "nf4", "none", or "auto", which is nf4 on CUDA and none on a CPU; `fused`: kernels of other packages
    may run. Computes in bf16 on CUDA and in float32 on a CPU. Raises UserError for anything that is not a loadable
    vision-language model of SUPPORTED_MODELS.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    quiet_libraries(device)
    folder, revision = hub_folder(name, "model", ["*.json", "*.safetensors", "*.txt", "*.jinja"])
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type not in SUPPORTED_MODELS:
            raise UserError(f"{name} is a {config.model_type} model; supported are the vision-language families "
                            f"{', '.join(SUPPORTED_MODELS)}")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        check_fit(name, config, tokenizer, image_processor)
        dtype, nf4 = precision(quantization, device.type)
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, device_map={"": device}, quantization_config=nf4_config(dtype) if nf4 else None,
            use_safetensors=True, trust_remote_code=False)  # a pickled model can run anything
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the model {name} cannot be loaded: {describe(error)}") from error
    if device.type == "cpu":
        keep_nf4_differentiable(model)
    take_branches(model)
    fused_kernels(model, fused)
    return model.requires_grad_(False).eval(), tokenizer, image_processor, revision


def check_context(model, prompt, max_tokens):
    """Raises UserError where a prompt of `prompt` tokens and its completion exceed the model's context."""
    context = model.config.text_config.max_position_embeddings
    if prompt + max_tokens > context:
        raise UserError(f"a prompt of {prompt} tokens and --max-tokens {max_tokens} exceed the model's context of "
                        f"{context}")


def stop_ids(model, tokenizer):
    """The tokens that end a completion. The model's own config names only the end of a text, not that of a turn."""
    ids = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
    return torch.tensor(sorted(ids), device=model.device)


def image_ids(model):
    """The tokens that stand for pictures and films. Drawn, they would be placeholders without features."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
    return torch.tensor(sorted({getattr(model.config, name, None) for name in names} - {None}), device=model.device)


def precision(quantization, device_type):
    """-> (type that the base computes in, whether its linear layers are 4-bit)."""
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    return dtype, quantization == "nf4" or (quantization == "auto" and device_type == "cuda")


def checkpoints_activations(flag, device_type):
    """--activation-checkpointing -> bool. Recomputing saves memory, of which a CPU's machine has enough."""
    return flag == "on" or (flag == "auto" and device_type != "cpu")


def fused_kernels(model, allowed):
    """Puts the functions that mix tokens into models of this kind -> whether flash-linear-attention runs.

    transformers takes flash-linear-attention and causal-conv1d where they can be imported, on a CPU too, where they
    cannot run. Each function of theirs stands for a reference in torch, which is put back here where they are not to
    be used. Around either comes what lets completions branch from their prompt.
    """
    allowed = allowed and model.device.type == "cuda"
    module = sys.modules[type(model.model.language_model).__module__]
    for name, package in KERNELS.items():
        if hasattr(module, name):
            installed = INSTALLED.setdefault((module.__name__, name), getattr(module, name))
            setattr(module, name, token_mixer(name, installed, allowed and importable(package)))
    return bool(allowed and hasattr(module, "torch_chunk_gated_delta_rule") and importable("fla"))


def token_mixer(name, function, kernel):
    """A function named in KERNELS as the model shall call it: with its package's kernel, or in torch."""
    if not kernel:
        function = inspect.unwrap(function)
        function = ONE_TOKEN[name](function) if name in ONE_TOKEN else function
    return BRANCHING[name](function) if name in BRANCHING else function


def kernels_line(model, allowed):
    """Says which code attention and recurrent layers run, and what to install for faster code."""
    line = "attention: sdpa"
    if "linear_attention" not in (getattr(model.config.text_config, "layer_types", None) or ()):
        return line
    if fused_kernels(model, allowed):
        convolution = "causal-conv1d" if importable("causal_conv1d") else "torch (pip install causal-conv1d)"
        return f"{line}; gated delta rule: flash-linear-attention; convolution: {convolution}"
    line += "; gated delta rule: torch reference"
    if model.device.type != "cuda" or not allowed:
        return line
    return f"{line}, correct but slower: pip install flash-linear-attention causal-conv1d"


def importable(package):
    try:
        importlib.import_module(package)
    except Exception:  # such packages fail in many ways where they do not fit torch or the GPU
        return False
    return True


# Every linear layer of the language model but the tiny gates: attention, gated delta net, MLP. Not the vision tower.
LORA_MODULES = (r".*language_model\.layers\.\d+\."
                r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|mlp\.(gate|up|down)_proj)")


def add_lora(base, base_name, rank, adapter=""):
    """Puts a float32 LoRA adapter (arXiv 2106.09685) into the frozen base: a new one, or the one in folder `adapter`.

    alpha = rank, no dropout. Gives the peft.PeftModel. Raises UserError for an adapter that does not fit.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    base_name = parse_id(base_name)[0]
    if adapter:
        check_adapter(adapter, base_name, base)
        try:
            model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
            require_all_weights(model, adapter)
        except (OSError, ValueError, LookupError, RuntimeError, TypeError, SafetensorError) as error:
            raise UserError(f"--adapter {adapter} cannot be put on {base_name}: "
                            f"{describe(error)}") from error
    else:
        model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0,
                                                target_modules=LORA_MODULES))
    # In bf16 a step of 4e-5 leaves many weights as they were; from_pretrained has no reason to agree on its own.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.peft_config["default"].base_model_name_or_path = base_name  # not this machine's cache folder
    return model


def check_adapter(folder, base_name, base):
    """Raises UserError where `folder` holds no LoRA adapter in safetensors and JSON, or one of another base model.

    A folder says which model its own base was only by a name and a class; names of hub models are compared.
    """
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (Path(folder) / file).is_file():
            raise UserError(f"--adapter {folder}: no {file} there")
    try:
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
        kind, others = config["peft_type"], config.get("megatron_config")
        made_for, auto_mapping = config.get("base_model_name_or_path") or "", config.get("auto_mapping") or {}
        made_for_class = auto_mapping.get("base_model_class", type(base).__name__)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"--adapter {folder}: adapter_config.json is damaged: {describe(error)}") from error
    if kind != "LORA" or others:
        raise UserError(f"--adapter {folder} is no plain LoRA adapter, peft_type is {kind}")
    if config.get("lora_dropout"):
        raise UserError(f"--adapter {folder} was trained with dropout, which would make the learner another policy "
                        "than the sampler: set lora_dropout to 0 in its adapter_config.json")
    if made_for_class != type(base).__name__:
        raise UserError(f"--adapter {folder} was made for a {made_for_class}; {base_name} is a {type(base).__name__}")
    on_hub = [name.count("/") == 1 and not Path(name).exists() for name in (made_for, base_name)]
    if all(on_hub) and made_for.lower() != base_name.lower():
        raise UserError(f"--adapter {folder} was made for {made_for}, not for {base_name}")


def require_all_weights(model, folder):
    """Raises ValueError where an adapter has not put a weight in each of its layers; PEFT leaves those as they were."""
    from peft import get_peft_model_state_dict

    with safe_open(Path(folder) / "adapter_model.safetensors", "pt") as file:
        different = set(file.keys()) ^ set(get_peft_model_state_dict(model, save_embedding_layers=False))
    if different:
        raise ValueError(f"{len(different)} weights are in only one of them, such as {min(different)}")


def quiet_libraries(device):
    """Switches off what libraries print and nobody can act on, so that the program's own lines stand out."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft calls it by its old name
    warnings.filterwarnings("ignore", message="Found missing adapter keys")  # require_all_weights says so
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
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"--device {name} is none of auto, cuda, cuda:N, cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA GPU here: run `python demo.py` to see it learn on a CPU, or add `--device cpu` and a "
                        "small --base-model")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise UserError(f"--device {name}: only {torch.cuda.device_count()} CUDA GPU(s) here")
        torch.cuda.set_device(device)  # where kernels of other libraries run
    return device


def check_fit(name, model_config, tokenizer, image_processor):
    """Raises UserError where tokenizer or image processor do not belong to the model, or there is no chat template."""
    vision = model_config.vision_config
    for ours, theirs in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"),
                         ("temporal_patch_size", "temporal_patch_size")):
        if getattr(image_processor, ours) != getattr(vision, theirs):
            raise UserError(f"{name}: {ours} is {getattr(image_processor, ours)} in preprocessor_config.json and "
                            f"{getattr(vision, theirs)} in config.json")
    if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != model_config.image_token_id:
        raise UserError(f"{name}: {IMAGE_TOKEN} is token {tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)} of the "
                        f"tokenizer and {model_config.image_token_id} in config.json")
    template_ids(tokenizer)


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
