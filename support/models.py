"""Models from a folder or the hub: device, 4-bit, the LoRA adapter, and whether the parts fit. Nothing of GRPO."""

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path

import torch
import transformers

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

    `fused`: kernels of other packages may run. Raises UserError for anything but a whole model of SUPPORTED_MODELS.
    """
    quiet_libraries(device)
    folder, revision = hub_folder(name, "model", ["*.json", "*.safetensors", "*.txt", "*.jinja"])
    dtype, nf4 = precision(quantization, device.type)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type not in SUPPORTED_MODELS:
            raise UserError(f"{name} is a {config.model_type} model; supported are the vision-language families "
                            f"{', '.join(SUPPORTED_MODELS)}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        check_fit(name, config, tokenizer, processor)
        model, loaded = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, device_map={"": device}, quantization_config=nf4_config(dtype) if nf4 else None,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True)  # a pickle can run anything
        if loaded["missing_keys"]:  # transformers would draw them
            raise UserError(f"the model {name} lacks {len(loaded['missing_keys'])} weights")
    except UserError:
        raise
    except Exception as error:  # the libraries raise nearly anything on damaged files
        own_code = "trust_remote_code" in str(error)
        reason = "it brings code of its own, which is never run" if own_code else describe(error)
        raise UserError(f"the model {name} cannot be loaded: {reason}") from error
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would repack 4-bit weights at the first
            module.support_avx512bf16_for_cpu = False  # rollout, for an operation that has no gradient
    take_branches(model)
    fused_kernels(model, fused)
    return model.requires_grad_(False).eval(), tokenizer, processor, revision


def check_context(model, prompt, max_tokens):
    """Raises UserError where a prompt of `prompt` tokens and its completion exceed the model's context."""
    context = model.config.text_config.max_position_embeddings
    if prompt + max_tokens > context:
        raise UserError(f"{prompt} prompt tokens and --max-tokens {max_tokens} exceed the model's context of {context}")


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
    """-> (type that the base computes in, whether its linear layers are 4-bit: "nf4", or "auto" on CUDA)."""
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    return dtype, quantization == "nf4" or (quantization == "auto" and device_type == "cuda")


def checkpoints_activations(flag, device_type):
    """--activation-checkpointing -> bool. Recomputing saves memory, of which a CPU's machine has enough."""
    return flag == "on" or (flag == "auto" and device_type != "cpu")


def fused_kernels(model, allowed):
    """Puts the functions that mix tokens into models of this kind -> whether flash-linear-attention runs.

    transformers takes a package's kernels wherever it can be imported, on a CPU too, where they cannot run.
    """
    allowed = allowed and model.device.type == "cuda"
    module = sys.modules[type(model.model.language_model).__module__]
    for name, package in KERNELS.items():
        if hasattr(module, name):
            installed = INSTALLED.setdefault((module.__name__, name), getattr(module, name))
            setattr(module, name, token_mixer(name, installed, allowed and importable(package)))
    return bool(allowed and hasattr(module, "torch_chunk_gated_delta_rule") and importable("fla"))


def token_mixer(name, function, kernel):
    """A function named in KERNELS as the model shall call it: its package's kernel, or the reference in torch."""
    function = function if kernel else inspect.unwrap(function)
    if name in BRANCHING:
        return BRANCHING[name](function)
    return function if kernel else ONE_TOKEN[name](function)


def kernels_line(model, allowed):
    """Says which code attention and recurrent layers run, and what to install for faster code."""
    if "linear_attention" not in (getattr(model.config.text_config, "layer_types", None) or ()):
        return "attention: sdpa"
    if fused_kernels(model, allowed):
        convolution = "causal-conv1d" if importable("causal_conv1d") else "torch (pip install causal-conv1d)"
        return f"attention: sdpa; gated delta rule: flash-linear-attention; convolution: {convolution}"
    advice = ", correct but slower: pip install flash-linear-attention causal-conv1d"
    return "attention: sdpa; gated delta rule: torch reference" + advice * (allowed and model.device.type == "cuda")


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
    from peft import LoraConfig, PeftModel

    base_name = parse_id(base_name)[0]
    config = (adapter_config(adapter, base_name, base) if adapter else
              LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_MODULES))
    try:
        model = PeftModel(base, config)
        loaded = model.load_adapter(adapter, "default", is_trainable=True) if adapter else None
    except Exception as error:  # PEFT raises nearly anything on damaged files
        raise UserError(f"--adapter {adapter} cannot be put on {base_name}: {describe(error)}") from error
    if different := loaded and loaded.missing_keys + loaded.unexpected_keys:  # PEFT leaves them as they are
        raise UserError(f"--adapter {adapter} and {base_name}: {len(different)} weights are in only one of them")
    for parameter in model.parameters():
        if parameter.requires_grad:  # in bf16 a step of 4e-5 leaves many weights as they were
            parameter.data = parameter.data.float()
    model.peft_config["default"].base_model_name_or_path = base_name  # not this machine's cache folder
    return model


def adapter_config(folder, base_name, base):
    """-> the LoraConfig in `folder`. Raises UserError where it is damaged, of another method or of another base."""
    from peft import PeftConfig

    base_class = type(base).__name__
    try:
        config = PeftConfig.from_pretrained(folder)
        made_for = str(config.base_model_name_or_path)
        made_for_class = (config.auto_mapping or {}).get("base_model_class", base_class)
    except Exception as error:
        raise UserError(f"--adapter {folder}: adapter_config.json is damaged: {describe(error)}") from error
    # A folder says which model it holds only by its class; names of hub models are compared.
    on_hub = [name.count("/") == 1 and not Path(name).exists() for name in (made_for, base_name)]
    for wrong, message in (
            (config.peft_type != "LORA" or config.megatron_config, "is no plain LoRA adapter"),
            (getattr(config, "lora_dropout", 0),  # the learner would be another policy than the sampler
             "was trained with dropout: set lora_dropout to 0 in its adapter_config.json"),
            (made_for_class != base_class, f"was made for a {made_for_class}; {base_name} is a {base_class}"),
            (all(on_hub) and made_for.lower() != base_name.lower(), f"was made for {made_for}, not for {base_name}")):
        if wrong:
            raise UserError(f"--adapter {folder} {message}")
    config.inference_mode = False  # True would freeze it
    return config


def quiet_libraries(device):
    """Switches off what libraries print and nobody can act on."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft calls it by its old name
    if device.type == "cpu":
        transformers.logging.set_verbosity_error()  # tells to install CUDA kernels
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()


def pick_device(name):
    """"auto", "cuda", "cuda:1" or "cpu" -> torch.device; UserError where it is not there."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name} is none of auto, cuda, cuda:N, cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU here: run `python demo.py` to see it learn on a CPU, or add `--device cpu` and a "
                        "small --base-model")
    index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise UserError(f"--device {name}: only {count} CUDA GPU(s) here")
    torch.cuda.set_device(index)  # where kernels of other libraries run
    return torch.device("cuda", index)


def check_fit(name, config, tokenizer, image_processor):
    """Raises UserError where tokenizer or image processor do not belong to the model, or there is no chat template."""
    vision = config.vision_config
    for what, found, needed in (
            ("patch_size is", image_processor.patch_size, vision.patch_size),
            ("merge_size is", image_processor.merge_size, vision.spatial_merge_size),
            ("temporal_patch_size is", image_processor.temporal_patch_size, vision.temporal_patch_size),
            (f"{IMAGE_TOKEN} is token", tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), config.image_token_id)):
        if found != needed:
            raise UserError(f"{name}: {what} {found}, and {needed} in config.json")
    template_ids(tokenizer)


def nf4_config(compute_dtype):
    """4-bit NF4 with double quantisation (QLoRA, arXiv 2305.14314) for the language model's linear layers."""
    # Naming any module drops the default protection of lm_head, and "visual" alone would not match "model.visual".
    # in_proj_a and in_proj_b are tiny gates of the recurrent layers, very sensitive to 4-bit.
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["lm_head", "model.visual", "in_proj_a", "in_proj_b"])
