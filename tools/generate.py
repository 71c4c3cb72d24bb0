"""Continue prompts with a checkpoint, without exporting it: one continuation a prompt.

python tools/generate.py --load CKPT --prompt "Once upon a time" --max-new-tokens 64
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_lengen.errors import Parser, require, run_main


def parser() -> Parser:
    """The command line."""
    parser = Parser(prog="generate.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", required=True, help="checkpoint or iteration folder")
    parser.add_argument("--iteration", type=int, help="default: the latest")
    parser.add_argument("--prompt", nargs="+", default=[], help="one text or several")
    parser.add_argument("--prompt-file", help="a file with a prompt on each line")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="of so many tokens; 0: of all")
    parser.add_argument("--top-p", type=float, default=1.0, help="of tokens with this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the choices")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    return parser


def main() -> None:
    """Load, generate, print each continuation on a line of its own."""
    args = parser().parse_args()
    prompts = list(args.prompt)
    if args.prompt_file:
        path = Path(args.prompt_file)
        require(path.is_file(), f"--prompt-file: found no file {path}")
        prompts += [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    require(bool(prompts), "--prompt: not given; allowed: a text, or --prompt-file")
    require(
        args.max_new_tokens >= 1,
        f"--max-new-tokens: found {args.max_new_tokens}; allowed: 1 or more",
    )
    # Imported here: building models is slow to import and --help needs none of it.
    from megatron_lengen.convert.reader import open_checkpoint
    from megatron_lengen.data.tokenizer import load_saved
    from megatron_lengen.generation.generate import Sampling, generate
    from megatron_lengen.models.build import build_for_inference
    from megatron_lengen.runtime import distributed

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    checkpoint = open_checkpoint(args.load, args.iteration)
    folder = checkpoint.tokenizer_folder
    require(folder is not None, f"--load: {checkpoint.folder} has no tokenizer")
    assert folder is not None
    tokenizer = load_saved(folder)
    model = build_for_inference(checkpoint.config(), lambda key: checkpoint.read(key).float())
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    end = None if args.ignore_eos else tokenizer.eod
    for row in generate(model, ids, args.max_new_tokens, end, sampling):
        print(tokenizer.decode([token for token in row if token != end]))
    distributed.stop()


if __name__ == "__main__":
    run_main(main)
