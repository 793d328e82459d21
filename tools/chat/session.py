"""The interactive part of talk.py: a dialogue with several models, and its commands."""

import contextlib
import io
import json

import talk_models
import talk_screen

from machinery.base import refused
from machinery.flags import declaring, ppo_rules
from machinery.rollout import reward_functions

SETTABLE = "temperature top_p top_k min_new_tokens max_answer_seq_len seed".split()


class Session:
    """A dialogue. Each model goes on from its own responses, unless one is picked for all."""

    def __init__(self, args, parser, writers, judge=None, gold=None):
        """gold: the function of --gold_fn."""
        self.args, self.writers, self.judge, self.gold = args, writers, judge, gold
        self.flags = {action.dest: action for action in parser._actions}
        self.system = []  # a message of the system, if there is one
        self.turn = 0  # of all questions and /retry: the random numbers depend on it
        self.prompts = []  # what the models were given last
        self.histories = [[] for _ in writers]  # of each model: messages
        dialogues = (talk_models.CHAT, talk_models.DIALOGUE)
        self.remembers = [writer.template in dialogues for writer in writers]

    def run(self):
        """Reads lines and acts on them, until /quit or the end of the input."""
        with contextlib.suppress(ImportError):
            set_up_readline([f"/{name}" for name in self.commands()])
        while True:
            try:
                if self.act(read_line()):
                    return
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\nstopped; the dialogue is as it was. /quit or Ctrl-D ends.")
            except SystemExit:  # refused.fail has said what is wrong
                pass

    def act(self, line):
        """Does what a line says: a command, or a question. Returns True if it is /quit."""
        name, _, rest = line.strip().partition(" ")
        if not name:
            return False
        if not name.startswith("/"):
            self.ask(line.strip())
            return False
        command = self.commands().get(name[1:])
        if command is None:
            refused.fail(f"there is no command {name}.\n  /help lists them.")
        return command(rest.strip()) is True

    def commands(self):
        """Returns {name: method} of all commands."""
        found = {name: getattr(self, name) for name in dir(self) if name.startswith("do_")}
        return {name.removeprefix("do_"): method for name, method in found.items()}

    # ---- Questions ----
    def ask(self, question):
        """Shows the models' responses to a question, and then keeps both in the dialogue."""
        self.turn += 1
        args, texts = self.args, []
        screen = talk_screen.Screen([writer.name for writer in self.writers])
        self.prompts = [self.prompt(number, question) for number in range(len(self.writers))]
        for number, writer in enumerate(self.writers):

            def show(text, number=number):
                screen.write(number, text)

            [answer] = writer.answers(args, [self.prompts[number]], self.turn, show)
            screen.done(number, answer["text"], self.note(writer, answer))
            texts.append(answer["text"])
        for history, text in zip(self.histories, texts):
            history.append({"role": "user", "content": question})
            history.append({"role": "assistant", "content": text})

    def prompt(self, number, question):
        """Returns the row of a question to model `number`, with what was said before."""
        before = self.histories[number] if self.remembers[number] else []
        messages = [*self.system, *before, {"role": "user", "content": question}]
        writer = self.writers[number]
        if writer.template == talk_models.CHAT:  # templates put their own spaces
            messages = [{**m, "content": m["content"].strip()} for m in messages]
        return writer.prompt(self.args, 0, messages)

    def note(self, writer, answer):
        """Returns what is written under a response: its scores, its length, how it ended."""
        parts = []
        if self.judge:
            [score] = self.judge.scores(self.args, writer, [answer])
            parts.append(f"reward {score:.3f}")
        if self.gold:
            parts.append(f"gold {quiet_score(self.gold, answer)}")
        count = len(answer["response_ids"])
        parts.append(f"{count} token{'s' * (count != 1)}")
        parts += [] if answer["ended"] else ["cut off: no EOS"]
        parts += ["the prompt's beginning was left out: too long"] if answer["cut"] else []
        return ", ".join(parts)

    # ---- Commands: the first line of each docstring is its line in /help ----
    def do_help(self, rest):
        """lists the commands"""
        for name, method in self.commands().items():
            print(f"  /{name:9} {method.__doc__.splitlines()[0]}")
        print("  A line that ends in \\ goes on in the next one. Ctrl-C stops a response.")

    def do_quit(self, rest):
        """ends; so does Ctrl-D"""
        return True

    def do_reset(self, rest):
        """forgets the dialogue, but not what /system says"""
        for history in self.histories:
            history.clear()

    def do_undo(self, rest):
        """takes the last question and its responses back"""
        if not self.histories[0]:
            refused.fail("nothing was asked yet.")
        question = self.histories[0][-2]["content"]
        for history in self.histories:
            del history[-2:]
        return question

    def do_retry(self, rest):
        """asks the last question again, with other random numbers"""
        self.ask(self.do_undo(rest))

    def do_pick(self, rest):
        """N: all models go on from the dialogue with model N, 1 being the first"""
        count = len(self.writers)
        if not rest.isdecimal() or not 1 <= int(rest) <= count:
            refused.fail(f"/pick takes the number of a model, 1 to {count}.")
        picked = self.histories[int(rest) - 1]
        self.histories = [list(picked) for _ in self.writers]

    def do_history(self, rest):
        """on or off: whether models are given what was said before; nothing: shows it"""
        if rest:
            if rest not in ("on", "off"):
                refused.fail("/history takes on, off or nothing.")
            self.remembers = [rest == "on"] * len(self.writers)
        for writer, history, used in zip(self.writers, self.histories, self.remembers):
            print(f"{writer.name}: {'given to it' if used else 'not given to it'}")
            for message in history:
                print(f"  {message['role']}: {talk_screen.clean(message['content'].strip())}")

    def do_prompt(self, rest):
        """shows the last prompt as each model was given it"""
        for writer, row in zip(self.writers, self.prompts):
            print(f"{writer.name}: {writer.tokenizer.decode(row['prompt_ids'])!r}")

    def do_system(self, rest):
        """TEXT: a message of the system at the start; nothing: none"""
        self.system = [{"role": "system", "content": rest}] if rest else []

    def do_template(self, rest):
        """TEXT with {} in the question's place, or chat; nothing: shows what is used"""
        template = read_template(rest, "/template") if rest else None
        for number, writer in enumerate(self.writers):
            if template:
                writer.set_template(template)
                dialogues = (talk_models.CHAT, talk_models.DIALOGUE)
                self.remembers[number] = template in dialogues
            print(f"{writer.name}: {writer.template!r}")

    def do_set(self, rest):
        """NAME VALUE: a flag of sampling, such as temperature; nothing: shows them"""
        if rest:
            name, _, text = rest.partition(" ")
            if name not in SETTABLE:
                refused.fail(f"/set takes one of {', '.join(SETTABLE)}, and a value.")
            try:
                value = self.flags[name].type(text)
            except ValueError:
                refused.fail(f"/set {name}: {text!r} is no such number.")
            args = declaring.of_role(self.args, **{name: value})
            declaring.check_numbers(args, [self.flags[name]])
            if broken := next(ppo_rules.sampling_rules(args), None):
                refused.fail(broken)
            self.args = args
        print(", ".join(f"{name} {getattr(self.args, name)}" for name in SETTABLE))

    def do_save(self, rest):
        """FILE.jsonl: writes the dialogues, one line of messages for each model"""
        lines = []
        for writer, history in zip(self.writers, self.histories):
            lines.append({"model": writer.name, "messages": [*self.system, *history]})
        try:
            with open(rest, "x") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            advice = "Name a file that is not there yet"
            refused.fail(f"/save {rest:.80}: {error.strerror}.\n  {advice}.")


# ---- Input ----
def set_up_readline(words):
    """Lets input() edit lines, and Tab complete commands. Raises ImportError where it cannot."""
    import readline

    def complete(text, number):
        fitting = [word for word in words if word.startswith(text)]
        return fitting[number] if number < len(fitting) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def read_line():
    r"""Returns a line from the keyboard or a pipe; one that ends in \ goes on in the next."""
    lines = [input("\n> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)


def read_template(text, flag):
    r"""Returns a template from what a person typed, where \n is a line break."""
    if text != talk_models.CHAT and text.count("{}") != 1:
        example = r"'Question: {}\nAnswer:'"
        refused.fail(f"{flag} {text!r}: it is chat, or text with one {{}}.\n  Like {example}.")
    return text.replace("\\n", "\n")


def quiet_score(function, answer):
    """Returns the score of a --gold_fn as text, or why it gives none: it may know other prompts."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            [score] = reward_functions.scores_of(function, [answer])
    except SystemExit:
        reason = said.getvalue().rpartition("error: ")[-1].split("\n")[0]
        return f"- ({reason:.80})"
    return f"{sum(score) if isinstance(score, list) else score:.3f}"
