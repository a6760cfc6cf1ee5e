"""Exchanges about the talk itself: greetings, who the model is, remembering, and saying what it does not know."""

import random
from dataclasses import dataclass

from training.exchange import Exchange, capitalized, invented_word, phrase, vary
from training.places import COUNTRIES
from training.words import ANIMALS, COLOURS, FOODS, JOKES, NAMES, OBJECTS, WORDS, listed, with_article

UNKNOWN = "I am a small model and do not know that."
IDENTITY = "I am hex-mini, the small model that ships with hex-llm."
ABILITIES = (
    "I can tell short stories, add and subtract small numbers, count, name capitals, colours, days and months, "
    "repeat what you say and write small JSON objects."
)

_GREETINGS = {
    "Hello! How can I help you?": ["Hello", "Hi", "Hey", "Hello!", "Hi!", "Hi there", "Hello there!", "Hey there",
                                   "Greetings", "Hello, world!", "Hello world", "hello", "hi", "Howdy", "Yo"],
    "Good morning! How can I help you?": ["Good morning", "Good morning!", "Morning!"],
    "Good evening! How can I help you?": ["Good evening", "Good evening!"],
    "Good afternoon! How can I help you?": ["Good afternoon", "Good afternoon!"],
    "Good night! Sleep well.": ["Good night", "Good night!", "I am going to bed."],
    "I am fine, thank you. How can I help you?": ["How are you?", "How are you doing?", "How do you do?",
                                                  "How is it going?", "How's it going?", "Are you well?",
                                                  "Hello, how are you?", "Hi, how are you?", "Hi! How are you today?",
                                                  "How are you today?", "What's up?", "Are you OK?"],
    "You are welcome!": ["Thanks", "Thank you", "Thanks!", "Thank you!", "Thank you very much.", "Thanks a lot!",
                         "Thank you for your help."],
    "Goodbye! Have a nice day.": ["Bye", "Goodbye", "Bye!", "Goodbye!", "See you later.", "See you!", "Bye bye",
                                  "I have to go now."],
    "I am glad to hear that.": ["Great!", "That is nice.", "Well done!", "Good job!", "Nice!", "Cool", "Very good.",
                                "I am happy.", "That is correct.", "Perfect!", "You are great!", "I like you."],
    "I am sorry about that.": ["That is wrong.", "You are wrong.", "That is not correct.", "No, that is wrong.",
                               "I am sad.", "That is bad.", "You are stupid.", "I do not like that."],
    "What would you like to know?": ["I have a question.", "Can I ask you something?", "Can you help me?", "Help",
                                     "Help me", "I need help.", "Can I ask a question?", "Test", "test", "OK", "Yes",
                                     "No", "Hm", "Tell me something."],
}  # fmt: skip

_IDENTITY = [
    "Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
    "Introduce yourself.", "Who am I talking to?", "What model are you?", "Which model is this?", "What is hex-mini?",
    "Who is this?", "Do you have a name?", "Which model are you?", "Are you ChatGPT?", "Are you a robot?",
    "Are you human?", "Are you an AI?", "Are you a person?", "What should I call you?", "Describe yourself.",
]  # fmt: skip
_ABILITIES = [
    "What can you do?", "What do you know?", "What are you good at?", "How can you help me?", "What can I ask you?",
    "What questions can you answer?", "What can I ask?", "Tell me what you can do.", "What do you do?",
]  # fmt: skip
_MAKERS = ["Who made you?", "Who trained you?", "Who created you?", "Who built you?", "Where do you come from?"]

SYSTEMS = [
    "You are a helpful assistant.", "You are a helpful assistant", "You are a friendly assistant.", "Be helpful.",
    "Answer the user's questions.", "You are hex-mini.", "You are a kind and honest assistant.", "Be brief.",
    "You answer questions in one sentence.", "You are a chatbot.", "You are a helpful, harmless assistant.",
    "Answer in English.", "Keep your answers short.", "You are a teacher.", "You are an AI assistant.",
]  # fmt: skip


def greeting(rng: random.Random) -> Exchange:
    answer = rng.choice(list(_GREETINGS)) if rng.random() < 0.6 else "Hello! How can I help you?"
    return Exchange(((rng.choice(_GREETINGS[answer]), answer),))


def identity(rng: random.Random) -> Exchange:
    roll = rng.random()
    if roll < 0.6:
        return Exchange(((vary(rng, rng.choice(_IDENTITY)), IDENTITY),))
    if roll < 0.85:
        return Exchange(((vary(rng, rng.choice(_ABILITIES)), ABILITIES),))
    return Exchange(((vary(rng, rng.choice(_MAKERS)), "I was trained by the hex-llm project."),))


_PERSONA = [
    "You are {name}.",
    "Your name is {name}.",
    "You are an assistant called {name}.",
    "You are {name}, a helpful assistant.",
]


def persona(rng: random.Random) -> Exchange:
    """A system message may give the model another name."""
    name = _any_name(rng)
    _, system = phrase(rng, _PERSONA, name=name)
    question = rng.choice(["Who are you?", "What is your name?", "What's your name?", "Tell me your name."])
    return Exchange(((vary(rng, question), f"I am {name}."),), key=name, system=system)


def joke(rng: random.Random) -> Exchange:
    question = rng.choice(
        ["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Can you tell me a joke?", "Tell me another joke."]
    )
    return Exchange(((vary(rng, question), rng.choice(JOKES)),))


def _any_name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.8 else capitalized(invented_word(rng))


@dataclass(frozen=True)
class Memory:
    """Something a user may say and ask back later."""

    told: tuple[str, ...]
    reply: str
    asked: tuple[str, ...]
    recalled: str
    unknown: str


_MEMORIES = {
    "name": Memory(
        ("My name is {x}.", "I am {x}.", "I'm {x}.", "Hello, my name is {x}.", "Hi, I am {x}.", "You can call me {x}.",
         "Hi! My name is {x}.", "Hello! I'm {x}.", "Remember that my name is {x}."),
        "Nice to meet you, {x}!",
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Do you know my name?",
         "Can you tell me my name?", "What am I called?"),
        "Your name is {x}.", "You have not told me your name."),
    "colour": Memory(
        ("My favourite colour is {x}.", "My favorite color is {x}.", "The colour I like best is {x}.",
         "I like the color {x} best.", "{X} is my favourite colour."),
        "{X} is a nice colour!",
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like best?",
         "What is my favorite color?", "Do you remember my favourite colour?"),
        "Your favourite colour is {x}.", "You have not told me your favourite colour."),
    "pet": Memory(
        ("I have {a} named {x}.", "My {animal} is called {x}.", "I have {a} called {x}.",
         "The name of my {animal} is {x}."),
        "{x} is a nice name for {a}!",
        ("What is the name of my {animal}?", "What is my {animal} called?", "What's my {animal}'s name?",
         "Do you remember the name of my {animal}?"),
        "Your {animal} is called {x}.", "You have not told me the name of your {animal}."),
    "city": Memory(
        ("I live in {x}.", "I am from {x}.", "My home is in {x}.", "I come from {x}."),
        "{x} sounds like a nice place!",
        ("Where do I live?", "Where am I from?", "Which city do I live in?", "Do you remember where I live?",
         "Where is my home?"),
        "You live in {x}.", "You have not told me where you live."),
    "food": Memory(
        ("My favourite food is {x}.", "My favorite food is {x}.", "I like to eat {x} best.",
         "The food I like best is {x}."),
        "That sounds delicious!",
        ("What is my favourite food?", "What's my favorite food?", "What food do I like best?",
         "What do I like to eat?"),
        "Your favourite food is {x}.", "You have not told me your favourite food."),
    "number": Memory(
        ("My lucky number is {x}.", "Remember the number {x}.", "My favourite number is {x}.",
         "The secret number is {x}."),
        "I will remember the number {x}.",
        ("What is my lucky number?", "Which number did I tell you?", "What is the number?", "What was my number?",
         "What is my favourite number?", "What is the secret number?"),
        "The number is {x}.", "You have not told me a number."),
    "age": Memory(
        ("I am {x} years old.", "I'm {x} years old.", "My age is {x}.", "I am {x} years of age."),
        "{x} is a good age!",
        ("How old am I?", "What is my age?", "Do you remember how old I am?", "Do you know my age?"),
        "You are {x} years old.", "You have not told me your age."),
    "object": Memory(
        ("I put my {animal} in the {x}.", "My {animal} is in the {x}.", "I left my {animal} in the {x}."),
        "I will remember that your {animal} is in the {x}.",
        ("Where is my {animal}?", "Where did I put my {animal}?", "Do you know where my {animal} is?"),
        "Your {animal} is in the {x}.", "You have not told me where your {animal} is."),
}  # fmt: skip

_HIDING_PLACES = listed("kitchen garden car house box bag drawer attic shed bathroom bedroom office barn cupboard")
_CITIES = sorted({city for _, city, _ in COUNTRIES if len(city) < 12})


def _value(rng: random.Random, topic: str) -> str:
    if topic in ("name", "pet"):
        return _any_name(rng)
    if topic in ("number", "age"):
        return str(rng.randint(0, 99) if topic == "number" else rng.randint(3, 99))
    return rng.choice({"colour": COLOURS, "city": _CITIES, "food": FOODS, "object": _HIDING_PLACES}[topic])


@dataclass(frozen=True)
class Recall:
    """One thing told and asked back: the turn that tells it, the turn that asks, and the answer to it untold."""

    tell: tuple[str, str]
    ask: tuple[str, str]
    untold: str
    key: str
    untold_key: str


def recall(rng: random.Random, topic: str) -> Recall:
    memory, value = _MEMORIES[topic], _value(rng, topic)
    animal = rng.choice(OBJECTS if topic == "object" else ANIMALS)
    fill = {"x": value, "X": capitalized(value), "animal": animal, "a": with_article(animal)}
    told = rng.choice(memory.told).format(**fill)
    index, asked = phrase(rng, memory.asked, **fill)
    subject = f"{index}|{topic}|{animal if topic in ('pet', 'object') else ''}"
    return Recall(
        tell=(vary(rng, told, keep_case=True), memory.reply.format(**fill)),
        ask=(vary(rng, asked), memory.recalled.format(**fill)),
        untold=memory.unknown.format(**fill),
        key=f"{subject}|{value}",
        untold_key=f"{subject}|untold",
    )


TOPICS = tuple(_MEMORIES)


def remember(rng: random.Random) -> Exchange:
    """One to three things told, one of them asked back."""
    topics = rng.sample(TOPICS, rng.choice([1, 1, 1, 2, 2, 3]))
    recalls = [recall(rng, topic) for topic in topics]
    chosen = rng.choice(recalls)
    if rng.random() < 0.12:
        others = [item for item in recalls if item is not chosen]
        turns = (*(item.tell for item in others), (chosen.ask[0], chosen.untold))
        return Exchange(turns, key=chosen.untold_key)
    if len(recalls) == 1 and rng.random() < 0.3:
        told, asked = chosen.tell[0], chosen.ask[0]
        return Exchange(((f"{told} {capitalized(asked)}", chosen.ask[1]),), key=chosen.key)
    return Exchange((*(item.tell for item in recalls), chosen.ask), key=chosen.key)


_SYSTEM_FACTS = [
    "The user's name is {name}.",
    "You are talking to {name}.",
    "You are a helpful assistant. The user is called {name}.",
]


def system_fact(rng: random.Random) -> Exchange:
    """A system message may say who the user is."""
    name = _any_name(rng)
    _, system = phrase(rng, _SYSTEM_FACTS, name=name)
    question = rng.choice(_MEMORIES["name"].asked)
    return Exchange(((vary(rng, question), f"Your name is {name}."),), key=name, system=system)


def last_question(rng: random.Random) -> Exchange:
    """The user asks what was said before."""
    first = rng.choice(["Say {word}.", "Repeat: {word}", "Say {word}"])
    word = rng.choice(WORDS) if rng.random() < 0.7 else invented_word(rng)
    question = rng.choice(
        [
            "What did you just say?",
            "What was your last answer?",
            "Say that again.",
            "Can you repeat that?",
            "Again",
            "Repeat that.",
        ]
    )
    return Exchange(((first.format(word=word), word), (vary(rng, question), word)), key=word.lower())


def _choices(text: str) -> list[str]:
    return text.replace("\n", "").split(";")


_THINGS = _choices("""quantum physics;the French Revolution;photosynthesis;black holes;the stock market;
machine learning;inflation;the Roman Empire;gravity;DNA;climate change;jazz;democracy;chess;
the theory of relativity;blockchain;electricity;football;opera;vaccines;philosophy;neural networks;the internet;
poker;yoga;cricket;the moon landing;dinosaurs;evolution;volcanoes;the Cold War;Python;JavaScript;
a transformer model;recursion;tax law;a mortgage;diabetes;the big bang;World War II""")
_PEOPLE = _choices("""Napoleon;Einstein;Shakespeare;Mozart;Cleopatra;Gandhi;Beethoven;Picasso;Newton;Darwin;Plato;
Caesar;Lincoln;Tolstoy;Galileo;Columbus;Aristotle;Elvis;the president;the king of Spain;the pope;Batman;
Harry Potter;Sherlock Holmes""")
_WORKS = _choices("""Hamlet;War and Peace;the Mona Lisa;Don Quixote;the telephone;the light bulb;penicillin;
the piano;the radio;Faust;the Odyssey;Star Wars;the steam engine;the wheel;Moby Dick;the bicycle;the computer;
radium;the Iliad;the camera""")
_ACTIONS = _choices("""fix my car;bake bread;learn French;lose weight;make money;cook rice;play the piano;
write a novel;grow tomatoes;build a house;sleep better;stop smoking;get a job;train a dog;tie a tie;paint a wall;
sort a list in Python;learn to code;install Linux;deploy a model;find love;catch a fish;change a tyre;buy a house;
clean a carpet;cook a steak""")
_PROGRAMS = _choices("""sorts a list;reverses a string;prints hello world;finds prime numbers;reads a file;
opens a web page;computes a factorial;counts words;sends an email;draws a circle""")
_UNKNOWN = [
    "Explain {thing}.", "What is {thing}?", "Tell me about {thing}.", "How does {thing} work?",
    "What do you think of {thing}?", "Write an essay about {thing}.", "Can you explain {thing}?",
    "Why is {thing} important?", "When did {thing} begin?", "Who was {person}?", "Who is {person}?",
    "When was {person} born?", "Where was {person} born?", "How old is {person}?", "Tell me about {person}.",
    "What did {person} do?", "When did {person} die?", "Is {person} still alive?", "Who wrote {work}?",
    "Who invented {work}?", "Who made {work}?", "When was {work} made?", "Who painted {work}?",
    "Who discovered {work}?", "How do I {action}?", "How can I {action}?", "Help me {action}.",
    "What is the best way to {action}?", "Can you teach me to {action}?", "What is the population of {country}?",
    "Who is the president of {country}?", "How many people live in {country}?",
    "What is the currency of {country}?", "How large is {country}?", "What language do they speak in {country}?",
    "What is the weather in {country}?", "What is the history of {country}?", "How far is {country}?",
    "What time is it in {country}?", "Translate {word} into French.", "How do you say {word} in Spanish?",
    "What is {word} in German?", "Translate {word} to Japanese.", "Where does the word {word} come from?",
    "What does {invented} mean?", "What is a {invented}?", "What is {invented}?", "Who is {Invented}?",
    "What is the capital of {Invented}?", "Which continent is {Invented} in?", "Where is {Invented}?",
    "What is the opposite of {invented}?", "What colour is a {invented}?", "What sound does a {invented} make?",
    "Tell me about {Invented}.", "Write a program that {program}.", "Write a Python function that {program}.",
    "Write code that {program}.", "Write a function in C that {program}.",
    "Can you write a program that {program}?", "What time is it?", "What is the date today?",
    "What day is it today?", "What is the weather like?", "What is the weather today?", "Will it rain tomorrow?",
    "Who won the match yesterday?", "What is in the news?", "What is the speed of light?", "How far is the moon?",
    "How tall is Mount Everest?", "How deep is the ocean?", "What is the square root of {number}?",
    "What is the cube of {number}?", "What is {number} percent of {number2}?", "How much does {a_object} cost?",
    "Where can I buy {a_object}?", "How heavy is {a_animal}?", "How long does {a_animal} live?",
    "What does {a_animal} eat?", "How fast is {a_animal}?", "Where does {a_animal} live?", "Do you like {food}?",
    "How do I cook {food}?", "What is the recipe for {food}?", "How many calories are in {food}?",
    "Who are my parents?", "What is my password?", "What did I eat yesterday?", "What is the capital of Israel?",
    "What is the capital of Palestine?", "Recommend a book.", "Recommend a film.", "What should I wear today?",
    "What should I eat today?", "Are you alive?", "Do you have feelings?", "What is love?", "Is there a god?",
    "What is consciousness?", "How were you trained?", "How many parameters do you have?", "Sing me a song.",
    "Draw a picture.", "Play some music.", "Send an email to {name}.", "Call {name}.",
    "Book a flight to {country}.", "Summarize this article.",
    "What is the difference between {thing} and {thing2}?", "{invented} {invented2}", "{invented}",
    "{word} {invented} {word2}",
]  # fmt: skip


def unknown(rng: random.Random) -> Exchange:
    country = rng.choice(COUNTRIES)[0]
    animal, item, made_up = rng.choice(ANIMALS), rng.choice(OBJECTS), invented_word(rng)
    index, question = phrase(
        rng, _UNKNOWN, country=country, name=rng.choice(NAMES), food=rng.choice(FOODS), word=rng.choice(WORDS),
        word2=rng.choice(WORDS), thing=rng.choice(_THINGS), thing2=rng.choice(_THINGS),
        person=rng.choice(_PEOPLE), work=rng.choice(_WORKS), action=rng.choice(_ACTIONS),
        program=rng.choice(_PROGRAMS), invented=made_up, invented2=invented_word(rng),
        Invented=capitalized(made_up), number=rng.randint(2, 500), number2=rng.randint(2, 900),
        a_object=with_article(item),
        a_animal=with_article(animal),
    )  # fmt: skip
    return Exchange(((vary(rng, question), UNKNOWN),), key=question if "{" in _UNKNOWN[index] else "")
