"""The interactive part of talk.py: a dialogue with several models, and its commands."""

import contextlib
import functools
import io
import json
import sys
import textwrap

from machinery import judges
from machinery.refused import Refused
from tools.chat import models, screen

SAMPLING = "temperature top_p top_k max_answer_seq_len seed".split()
MEMORY = (models.CHAT, models.DIALOGUE)  # templates that hold a dialogue, not one question alone


class Session:
    """A dialogue. Each model goes on from its own responses."""

    def __init__(self, flags, writers, judge=None, gold=None):
        """gold: the function of --gold_fn.

        flags(words) returns the flags, with words such as --temperature 0.7 on top of those given.
        """
        self.flags, self.words = flags, []  # of /set
        self.args = flags()
        self.writers, self.judge, self.gold = writers, judge, gold
        self.turn = 0  # of all questions and /retry: the random numbers depend on it
        self.prompts = []  # what the models were given last
        self.histories = [[] for _ in writers]  # of each model: messages

    def run(self):
        """Reads lines and acts on them, until /quit or the end of the input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() then edits lines
        while True:
            try:
                self.act(read_line())
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\nstopped; the dialogue is as it was. /quit or Ctrl-D ends.")
            except (Refused, OSError) as error:  # OSError: of /save
                print(f"error: {error}", file=sys.stderr)

    def act(self, line):
        """Does what a line says: a command, or a question."""
        name, _, rest = line.strip().partition(" ")
        if not name.startswith("/"):
            if name:
                self.ask(line.strip())
            return
        command = getattr(self, f"do_{name[1:]}", None)
        if command is None:
            raise Refused("no-command", f"there is no command {name}.\n  /help lists them.")
        command(rest.strip())

    # ---- Questions ----
    def ask(self, question):
        """Shows the models' responses to a question, and then keeps both in the dialogue."""
        self.turn += 1
        texts = []
        self.prompts = [self.prompt(*pair, question) for pair in zip(self.writers, self.histories)]
        with screen.Screen([writer.name for writer in self.writers]) as shown:
            for number, writer in enumerate(self.writers):
                show = functools.partial(shown.write, number)
                [answer] = writer.answers(self.args, [self.prompts[number]], self.turn, show)
                show(answer["text"], self.note(writer, answer))
                texts.append(answer["text"])
        for history, text in zip(self.histories, texts):
            history.append({"role": "user", "content": question})
            history.append({"role": "assistant", "content": text})

    def prompt(self, writer, history, question):
        """Returns the row of a question to a model, with what was said before."""
        before = history if writer.template in MEMORY else []
        messages = [*before, {"role": "user", "content": question}]
        if writer.template == models.CHAT:  # templates put their own spaces
            messages = [{**m, "content": m["content"].strip()} for m in messages]
        return writer.prompt(self.args, 0, messages)

    def note(self, writer, answer):
        """Returns what is written under a response: its scores, its length, how it ended."""
        parts = []
        if self.judge:
            [score] = self.judge.scores(self.args, writer, [answer])
            parts.append(f"reward {score:.3f}")
        if self.gold:
            parts.append(score_in_words(self.gold, answer))
        count = len(answer["response_ids"])
        parts.append(f"{count} token{'s' * (count != 1)}")
        parts += [] if answer["ended"] else ["cut off: no EOS"]
        parts += ["the prompt's beginning was left out: too long"] if answer["cut"] else []
        return ", ".join(parts)

    # ---- Commands: a docstring is its line in /help ----
    def do_help(self, rest):
        """lists the commands"""
        for name in dir(self):
            if name.startswith("do_"):
                print(f"  /{name[3:]:9} {getattr(self, name).__doc__}")
        print("  A line that ends in \\ goes on in the next one. Ctrl-C stops a response.")

    def do_quit(self, rest):
        """ends; so does Ctrl-D"""
        raise EOFError

    def do_reset(self, rest):
        """forgets the dialogue"""
        for history in self.histories:
            history.clear()

    def do_undo(self, rest):
        """takes the last question and its responses back"""
        if not self.histories[0]:
            raise Refused("nothing-asked", "nothing was asked yet.")
        question = self.histories[0][-2]["content"]
        for history in self.histories:
            del history[-2:]
        return question

    def do_retry(self, rest):
        """asks the last question again, with other random numbers"""
        before = [[*history] for history in self.histories]
        try:
            self.ask(self.do_undo(rest))
        except BaseException:  # Ctrl-C among them
            self.histories = before
            raise

    def do_prompt(self, rest):
        """shows the last prompt as each model was given it"""
        for writer, row in zip(self.writers, self.prompts):
            print(f"{writer.name}: {writer.tokenizer.decode(row['prompt_ids'])!r}")

    def do_set(self, rest):
        """NAME VALUE: a flag of sampling, such as temperature 0.7"""
        name, _, value = rest.partition(" ")
        if name not in SAMPLING or not value:
            words = f"/set takes one of {', '.join(SAMPLING)}, and a value."
            raise Refused("no-flag", words)
        words = [*self.words, f"--{name}", value]
        self.args, self.words = self.flags(words), words

    def do_save(self, rest):
        """FILE.jsonl: writes the dialogues, one line of messages for each model"""
        with open(rest, "x") as file:  # which must not be there yet
            for writer, history in zip(self.writers, self.histories):
                print(json.dumps({"model": writer.name, "messages": history}), file=file)


def read_line():
    r"""Returns a line from the keyboard or a pipe; one that ends in \ goes on in the next."""
    lines = [input("\n> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)


def score_in_words(function, answer):
    """Returns the score of a --gold_fn, or why it gives none: it may know other prompts only.

    Of what a ValueError says it is the first line.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            [score] = judges.scores_of(function, [answer])
    except Exception as error:  # of the user's function
        words = str(error).partition("\n")[0] if isinstance(error, ValueError) else repr(error)
        return textwrap.shorten(f"gold: {words}", 100, placeholder=" ...")
    return f"gold {sum(score):.3f}"
