"""Turns text into token ids for the programs here, and their answers into text.

    python token_ids.py encode FOLDER.tokenizer --text-file FILE > ids.txt
    python token_ids.py encode FOLDER.tokenizer --dataset pydoc --tokens 6000 > ids.txt
    python token_ids.py decode FOLDER.tokenizer < answer.txt

FOLDER.tokenizer is the folder that `h2o-prefill export` writes beside a package.
"""

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer

from h2o_prefill.eval import load_text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", default="pydoc", help="as in h2o-prefill ppl")
    parser.add_argument("--text-file", type=Path, help="UTF-8 text instead of the dataset")
    parser.add_argument("--tokens", type=int, help="tokens of the text to keep, by default all")
    options = parser.parse_args()
    try:
        # The tokenizer's own message does not name the file.
        text = (options.folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
        if options.direction == "encode":
            if options.text_file is None:
                text = load_text(options.dataset).text
            else:
                text = options.text_file.read_text(encoding="utf-8")
            print(*tokenizer.encode(text).ids[: options.tokens])
        else:
            print(tokenizer.decode([int(x) for x in sys.stdin.read().split()]))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
