"""Times one GRPO step of grpo.py against one of TRL's GRPOTrainer: same model, same questions, same work, on a CPU.

    python -m venv runs/trl                                    # TRL lives in its own environment
    runs/trl/bin/pip install torch==2.13.0                     # first, and the version that is here
    runs/trl/bin/pip install transformers==5.24.0 trl peft datasets accelerate pillow
    python -m tools.bench                                      # minutes; --quick: one step of each side

pytest does not collect this file. The parent makes a model folder, then starts one process for each column of the table
and lets them take steps in turn, never two at once. Both sides do this work in a step:
 1. A randomly initialised Qwen3.5 of about 7 M parameters (three delta-net layers to one of attention, as the real one)
    in float32, LoRA of rank 32 on the same linear layers, AdamW at the same learning rate.
 2. The same 8 questions, 8 completions each, temperature 1, at most 256 tokens. A fixed bias on the stop token's logit,
    in the output head that both load, makes lengths geometric with mean about 60.
 3. In each group half of the completions are rewarded, whatever they say: all 64 rows have a gradient on both sides.
    Advantage is reward - mean, the loss a mean over all tokens, no KL term, one optimiser step.
 4. 8 completions in a micro-batch on both sides, which the parent checks by the learner's forward passes: ours are the
    group of one prompt, because the token budget is without limit here; TRL shuffles the rows of a step first.
    --trl-rows names other numbers for TRL.
 5. No activation checkpointing, no logging, no evaluation, no checkpoints. Threads: --threads (2), by OMP_NUM_THREADS
    and torch.set_num_threads. OpenMP threads sleep while they wait, so that the idle process disturbs nothing.

What is not the same, and whom it helps:
 - Sampling is the call that turns encoded prompts into tokens: `grpo.sample` and `GRPOTrainer._generate_single_turn`.
   Ours finds the log-probability and the entropy of each token there; TRL does both in its learner. Learning is
   `grpo.update`, and the whole of TRL's step without generating and scoring. The rest, encoding and rewards, is small;
   our uniform numbers, which decide the draws, belong to it: milliseconds.
 - Ours shares prefill and figures within a group, drops rows that have finished, computes a prompt once a micro-batch
   in the learner, pads completions there in the delta rule only, and takes the loss from the sampler's
   log-probabilities. These are the differences to be measured. Stock TRL pads every micro-batch to the longest prompt
   and the longest completion of the step.
 - Tokens that the learner computes are the elements of `input_ids` in its forward passes. Beside them stand those that
   the step has: each prompt once, and the completions. What the delta rule pads inside itself is not among them.
 - TRL's fetch of decoded figures from its data set happens between two steps and is not counted. Ours has them decoded
   in memory beforehand.
 - Qwen3.5's video processor needs torchvision, so TRL gets the family's processor without it. No question has a video.
 - TRL's second column has 16 rows in a micro-batch: a little less CPU time than with 8. In a single try 64 rows took
   longer to learn, and 15 GB. Both TRL columns draw from one seed, so a few steps of luck in lengths hit both: compare
   tokens a second too. vLLM, Liger and flash attention need a GPU; TRL's continuous batching takes no images.
 - Memory is resident memory of the process: its peak in the measured steps, and that above what was there before the
   first step. Beside seconds stand CPU seconds of all threads: they say more where other programs share the cores.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
REAL_QUESTIONS = ROOT.parent / "shared" / "geolaux"
QUESTIONS, GROUP, MAX_TOKENS, MEAN_LENGTH, LORA_RANK, LEARNING_RATE = 8, 8, 256, 60, 32, 4e-5
ROWS = QUESTIONS * GROUP

# ------------------------------------------------------------------------------------------------ Model and questions


def make_model(folder, questions):
    """Writes a random Qwen3.5 of about 7 M parameters, with the real image processor's sizes, to `folder`."""
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen3_5Tokenizer

    from demo_model.make import CHAT_TEMPLATE, SPECIAL, new_model
    from geoqa import format_question
    from tiny import write_image_processor

    texts = [text for question in questions for text in (format_question(question), question.answer)]
    tokenizer = Qwen3_5Tokenizer().train_new_from_iterator([texts], vocab_size=2000, show_progress=False)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = new_model(tokenizer, {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 576, "num_hidden_layers": 8,
        "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
            "partial_rotary_factor": 0.25}},
        {"hidden_size": 128, "intermediate_size": 512, "out_hidden_size": 256, "num_position_embeddings": 2304})
    model.save_pretrained(folder)
    write_image_processor(folder)
    return sum(weight.numel() for weight in model.parameters())


def bias_output_head(model, tokenizer):
    """Gives the output head a bias: the stop token has probability 1/MEAN_LENGTH, other special tokens almost none.

    Without the second part TRL, which forbids the image token alone, would draw other tokens than ours.
    """
    import torch

    head = model.get_output_embeddings()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special and token != stop]
    bias = torch.zeros(head.out_features)
    bias[special] = -30.0
    spread = 0.02 ** 2 * head.in_features  # variance of a logit: rows of std 0.02, states of norm sqrt(width)
    bias[stop] = torch.tensor((head.out_features - len(special)) / (MEAN_LENGTH - 1)).log() + spread / 2
    with torch.no_grad():
        head.weight[stop] = 0.0  # its logit is the bias alone
    head.bias = torch.nn.Parameter(bias, requires_grad=False)


def load_questions(dataset):
    """The training questions, figures decoded and on white."""
    from geoqa import load_geoqa
    from vision_tokens import on_white

    return [dataclasses.replace(q, image=on_white(q.image)) for q in load_geoqa(dataset, "train")]


# ------------------------------------------------------------------------------------------------------ Both workers


class Meter:
    """What one step took: seconds and CPU seconds of its parts, figures, tokens, memory. Reads `/proc`: Linux only.

    `model` is the transformers model, before or after PEFT has put an adapter into it.
    """

    def __init__(self, model):
        model.model.visual.register_forward_pre_hook(self.count_figures, with_kwargs=True)
        model.model.register_forward_pre_hook(self.count_learned, with_kwargs=True)

    def count_figures(self, module, arguments, keywords):
        self.figures += len(keywords["grid_thw"] if "grid_thw" in keywords else arguments[1])

    def count_learned(self, module, arguments, keywords):
        import torch

        if torch.is_grad_enabled():  # not the sampler's
            self.passes += 1
            self.computed += keywords["input_ids"].numel()

    def timed(self, part, function):
        """`function`, its seconds and CPU seconds (of all threads) added to those of `part`."""
        def wrapper(*arguments, **keywords):
            wall, cpu = time.perf_counter(), time.process_time()
            result = function(*arguments, **keywords)
            self.add(part, time.perf_counter() - wall, time.process_time() - cpu)
            return result
        return wrapper

    def add(self, part, wall, cpu):
        self.step[part] = self.step.get(part, 0.0) + wall
        self.step[f"{part} cpu"] = self.step.get(f"{part} cpu", 0.0) + cpu

    def start(self):
        self.step, self.figures, self.passes, self.computed = {}, 0, 0, 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present size
        self.started = time.perf_counter(), time.process_time()

    def stop(self, lengths, prompt_lengths):
        """-> the step. `lengths` in tokens of all completions, `prompt_lengths` of the prompt of each."""
        self.add("step", time.perf_counter() - self.started[0], time.process_time() - self.started[1])
        return self.step | {"rows": len(lengths), "tokens": sum(lengths), "length": statistics.mean(lengths),
                            "prompt": statistics.mean(prompt_lengths), "figures": self.figures,
                            "passes": self.passes, "computed": self.computed,
                            "needed": sum(prompt_lengths) // GROUP + sum(lengths), "peak": resident("VmHWM")}


def resident(name):
    """"VmRSS" (now) or "VmHWM" (peak) of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def step_is_due():
    """Waits for the parent. False at the end."""
    return sys.stdin.readline().strip() == "step"


def our_worker(options, send):
    """Steps of grpo.py, a group in a micro-batch."""
    import torch

    import grpo
    from support.command_line import checked_config
    from support.order import Order

    rewards = itertools.cycle([1.0, 0.0])
    task = dataclasses.replace(grpo.GEOQA, rewards={"every_second": lambda answer, question: next(rewards)})
    config = checked_config(grpo.Config(
        base_model=options.model, device="cpu", batch_size=QUESTIONS, group_size=GROUP, max_tokens=MAX_TOKENS,
        reward="every_second", lora_rank=LORA_RANK, learning_rate=LEARNING_RATE,
        tokens_per_micro_batch=10**9), task.rewards)  # no group is cut
    policy = grpo.load_policy(config)
    bias_output_head(policy.base, policy.tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    order, meter = Order(load_questions(options.dataset), config.seed), Meter(policy.base)
    grpo.SAMPLERS["loop"] = meter.timed("sampling", grpo.sample)
    grpo.update = meter.timed("learning", grpo.update)
    policy.base.forward = meter.timed("forward", policy.base.forward)  # the sampler's; the learner calls base.model
    send({"loaded": resident("VmRSS"), "trained": sum(p.numel() for p in policy.parameters())})
    while step_is_due():
        order.step += 1
        meter.start()
        _, batch = grpo.train_step(policy, optimizer, order, config, task)
        send(meter.stop([row.length for row in batch.rows], [len(row.prompt.ids) for row in batch.rows]))


def trl_model(folder):
    """-> (model, processor) as TRL takes them."""
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor

    class FigureProcessor(Qwen3VLProcessor):  # the family's, without the video half, which needs torchvision
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    bias_output_head(model, tokenizer)
    return model, FigureProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def trl_config(options):
    from trl import GRPOConfig

    accumulate = ROWS // options.rows
    return GRPOConfig(
        output_dir=str(Path(options.model) / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=options.rows, gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate, num_generations=GROUP, num_iterations=1, beta=0.0, loss_type="dapo",
        scale_rewards="none", max_completion_length=MAX_TOKENS, temperature=1.0, top_p=1.0, top_k=0,
        chat_template_kwargs={"enable_thinking": False}, shuffle_dataset=False, max_steps=10_000,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)


def trl_worker(options, send):
    """Steps of trl.GRPOTrainer, `options.rows` rows in a micro-batch."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from geoqa import format_question
    from support.models import LORA_MODULES

    model, processor = trl_model(options.model)
    meter, lengths, prompt_lengths = Meter(model), [], []
    dataset = Dataset.from_list([{"image": question.image, "prompt": [{"role": "user", "content": [
        {"type": "text", "text": format_question(question)}, {"type": "image"}]}]}
        for question in load_questions(options.dataset)])

    class InTurn(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if step_is_due():
                meter.start()
            else:
                os._exit(0)  # a stop by `control` would still take this step

        def on_step_end(self, args, state, control, **_):
            step = meter.stop(lengths, prompt_lengths)
            for clock in ("", " cpu"):
                step[f"learning{clock}"] = step[f"step{clock}"] - step.pop(f"generate and score{clock}")
            send(step)

    trainer = GRPOTrainer(
        model=model, processing_class=processor, train_dataset=dataset, callbacks=[InTurn()], args=trl_config(options),
        reward_funcs=lambda completions, **_: [float(i % 2 == 0) for i in range(len(completions))],
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, lora_dropout=0.0, target_modules=LORA_MODULES))
    time_sampling(trainer, meter, lengths, prompt_lengths)
    send({"loaded": resident("VmRSS"),
          "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)})
    trainer.train()


def time_sampling(trainer, meter, lengths, prompt_lengths):
    """Has the trainer time its sampling and write the lengths, in tokens, of a step's rows into the two lists."""
    generate = meter.timed("sampling", trainer._generate_single_turn)

    def single_turn(prompt_ids, *arguments, **keywords):
        completions, logprobs = generate(prompt_ids, *arguments, **keywords)
        prompt_lengths[:] = map(len, prompt_ids)
        lengths[:] = map(len, completions)
        return completions, logprobs

    trainer._generate_single_turn = single_turn
    trainer._generate_and_score_completions = meter.timed(
        "generate and score", trainer._generate_and_score_completions)


# ------------------------------------------------------------------------------------------------------------ Parent


class Worker:
    """A process that takes steps when asked; `side` is "ours" or "trl"."""

    def __init__(self, side, rows, model, dataset, options):
        self.name, self.rows, self.steps = f"{'ours' if side == 'ours' else 'TRL'}, {rows} rows", rows, []
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE",
                                    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable if side == "ours" else options.trl_python, __file__, "--worker", side, "--rows", str(rows),
             "--model", model, "--dataset", dataset, "--threads", str(options.threads)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start = self.read()

    def read(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else sys.exit(f"error: {self.name} stopped, see above")

    def step(self):
        print("step", file=self.process.stdin, flush=True)
        step = self.read()
        if step["rows"] != ROWS:
            sys.exit(f"error: {self.name} drew {step['rows']} completions instead of {ROWS}")
        if step["passes"] * self.rows != ROWS:
            sys.exit(f"error: {self.name} learned in {step['passes']} forward passes instead of {ROWS // self.rows}")
        self.steps.append(step | {"above": step["peak"] - self.start["loaded"]})
        return step


QUANTITIES = {  # of a step
    "seconds": lambda step: step["step"], "of it sampling": lambda step: step["sampling"],
    "of it learning": lambda step: step["learning"], "CPU seconds": lambda step: step["step cpu"],
    "of them sampling": lambda step: step["sampling cpu"], "of them learning": lambda step: step["learning cpu"],
    "completion tokens a second": lambda step: step["tokens"] / step["step"],
    "the same while sampling": lambda step: step["tokens"] / step["sampling"],
    "learning, ms a completion token": lambda step: 1000 * step["learning"] / step["tokens"],
    "tokens that the learner computes": lambda step: step["computed"],
    "tokens that the step has": lambda step: step["needed"],
    "peak memory, MiB": lambda step: step["peak"], "of it above the loaded model": lambda step: step["above"],
    "figures encoded": lambda step: step["figures"], "mean completion length": lambda step: step["length"],
    "mean prompt length": lambda step: step["prompt"]}


def print_table(workers):
    print("\n| median of a step | " + " | ".join(
        f"{worker.name} | / ours" if worker is not workers[0] else worker.name for worker in workers) + " |")
    print("|---" * (2 * len(workers)) + "|")
    for name, quantity in QUANTITIES.items():
        ours, *others = (statistics.median(map(quantity, worker.steps)) for worker in workers)
        print(f"| {name} | {ours:.4g}" + "".join(f" | {other:.4g} | {other / ours:.2f}" for other in others) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="one measured step, no warm-up: does it still run?")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--trl-rows", type=int, nargs="+", default=[GROUP, 2 * GROUP], metavar="N",
                        help=f"columns of TRL: completions in a micro-batch, ours has {GROUP}")
    parser.add_argument("--trl-python", default=str(ROOT / "runs/trl/bin/python"), help="python of TRL's environment")
    parser.add_argument("--worker", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--dataset", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if any(rows < 1 or ROWS % rows for rows in options.trl_rows):
        parser.error(f"--trl-rows must divide the {ROWS} completions of a step")
    if options.worker:
        import torch

        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to stderr, not to the parent
        torch.set_num_threads(options.threads)
        worker = our_worker if options.worker == "ours" else trl_worker
        return worker(options, lambda message: print(json.dumps(message), file=answers, flush=True))
    if options.quick:
        options.steps, options.warmup = 1, 0
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


def compare(options, folder):
    dataset, model = str(REAL_QUESTIONS), folder / "model"
    if not REAL_QUESTIONS.is_dir():
        from demo import write_dataset

        dataset = str(folder / "data")
        write_dataset(Path(dataset))
    model.mkdir()
    size = make_model(model, load_questions(dataset))
    workers = [Worker(side, rows, str(model), dataset, options) for side, rows in (
        ("ours", GROUP), *(("trl", rows) for rows in options.trl_rows))]
    adapters = ", ".join(f"{worker.start['trained']:,}" for worker in workers)
    print(f"{size:,} parameters, adapters of {adapters}; {options.threads} threads; questions: {dataset}")
    for t in range(options.warmup + options.steps):
        for worker in workers:
            step = worker.step()
            print(f"{'warm-up' if t < options.warmup else 'step'} {t + 1}, {worker.name}: {step['tokens']} tokens, " +
                  ", ".join(f"{part} {step[part]:.2f} s (CPU {step[f'{part} cpu']:.2f})"
                            for part in ("step", "sampling", "learning")), flush=True)
            if t < options.warmup:
                worker.steps.clear()
    print_table(workers)
    share = statistics.median(step["forward"] / step["sampling"] for step in workers[0].steps)
    print(f"\nours: {share:.0%} of the sampling time is inside the model's forward")
    for worker in workers:
        worker.process.stdin.close()
        worker.process.wait()


if __name__ == "__main__":
    main()
