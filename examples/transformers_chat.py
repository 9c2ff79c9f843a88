"""A chat with Hugging Face transformers that goes on in a new process: its prefix comes from the store.

    python transformers_chat.py MODEL

MODEL is a folder or a name on the Hugging Face hub; its tokenizer needs a chat template. Starts a daemon of
its own.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon

SYSTEM = "You are a patient teacher of arithmetic. You explain every step in one short sentence."
QUESTIONS = ["What is 12 times 12?", "And divided by 9?", "Is the result a prime?", "Which primes divide it?"]
ANSWER_TOKENS = 32


def chat(model_name: str, url: str, questions: list[str], messages: list[dict]) -> list[dict]:
    """Asks these questions after the earlier messages. Returns all messages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from kvstore_transformers import PrefixCache  # noqa: PLC0415 - slow, and only this process needs them

    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name).eval()
    with Client(url, deadline_s=10.0) as client:
        cache = PrefixCache(model, client, block_tokens=32)
        for question in questions:
            messages.append({"role": "user", "content": question})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            tokens = cache.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            last = cache.last
            print(f"  {last.prompt_tokens} prompt tokens, {last.restored_tokens} from the store", flush=True)
    return messages


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    messages = [{"role": "system", "content": SYSTEM}]
    with LocalDaemon({"dram": {"limit": "512MiB"}}) as daemon:
        for name, questions in (("first process", QUESTIONS[:2]), ("second process", QUESTIONS[2:])):
            print(f"{name}:", flush=True)
            with ProcessPoolExecutor(1, spawn) as process:
                messages = process.submit(chat, sys.argv[1], daemon.url, questions, messages).result()


if __name__ == "__main__":
    main()
