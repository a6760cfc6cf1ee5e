"""Short stories and poems, built so that they keep to their subject, name and place."""

import random

from training.exchange import Exchange, capitalized, phrase, vary
from training.words import ANIMALS, COLOURS, FOODS, NAMES, OBJECTS, PLACES, listed, with_article

_TRAITS = listed("little brave shy curious clever kind lazy hungry old young tiny cheerful sleepy lonely happy")
_OPENINGS = [
    "Once upon a time there was {a_trait} {who} named {name}. {name} lived in {a_place}.",
    "Once upon a time, in {a_place}, there lived {a_trait} {who} called {name}.",
    "There once was {a_trait} {who}. Its name was {name}, and its home was {a_place}.",
    "In {a_place} lived {a_trait} {who}. Everybody called it {name}.",
    "{name} was {a_trait} {who} who lived in {a_place}.",
]

_PLOTS = [
    [
        ["One morning {name} found {a_colour} {thing} under a tree.",
         "One day {name} saw {a_colour} {thing} in the grass."],
        ['"Whose {thing} is this?" asked {name}.', "{name} wondered who had lost it.",
         '"Somebody must miss this {thing}," thought {name}.'],
        ["{name} went from door to door and asked everybody.", "So {name} walked all day and asked every friend."],
        ["At last {name} met {a_friend} named {friend}, who had lost the {thing}.",
         "In the evening {name} met {friend}, {a_friend}, who was crying about the lost {thing}."],
        ["{name} gave the {thing} back, and {friend} smiled.",
         '"Here is your {thing}," said {name}, and {friend} was very happy.'],
        ["From that day on {name} and {friend} were best friends."],
    ],
    [
        ["One day {name} wanted to learn to {skill}.", "More than anything, {name} wanted to {skill}."],
        ["{name} tried and tried, but it was too hard.", "The first time it did not work at all."],
        ["Then {a_friend} named {friend} came by.", "{friend}, {a_friend}, watched from behind a rock."],
        ['"Do not give up," said {friend}. "Try it slowly."', '"I will show you how," said {friend}.'],
        ["They practised together every day for a week.", "They practised until the sun went down."],
        ["In the end {name} could {skill}, and everybody cheered.",
         "At last {name} could {skill} and danced with joy."],
    ],
    [
        ["One night there was a big storm.", "One day it rained and rained."],
        ["{name} was alone at home and felt afraid.", "The wind was loud, and {name} could not sleep."],
        ["Then there was a knock at the door.", "Suddenly {name} heard a small voice outside."],
        ["It was {friend}, {a_friend}, all wet and cold.", "{a_friend_cap} named {friend} stood there in the rain."],
        ['"Come in," said {name}, and made some {food}.', "{name} let {friend} in and shared some {food}."],
        ["They told each other stories until the morning, and {name} was not afraid any more.",
         "Soon the storm was over, and the two were friends."],
    ],
    [
        ["One morning {name} was very hungry.", "{name} loved {food} more than anything."],
        ["But there was no {food} left at home.", "But the bowl was empty."],
        ["So {name} went to see {friend}, {a_friend}.", "So {name} asked {a_friend} named {friend} for help."],
        ['"Let us make {food} together," said {friend}.', '"I have a plan," said {friend}. "We will make {food}."'],
        ["They worked all day, and it smelled wonderful.", "They cooked and laughed the whole afternoon."],
        ["In the evening they shared the {food} with everybody.", "It was the best {food} that {name} had ever eaten."],
    ],
    [
        ["One day {name} heard about a hidden treasure.", "One day {name} found an old map."],
        ["The map showed the way over a bridge and up a hill.", "It was far away, behind the high hills."],
        ["{name} asked {friend}, {a_friend}, to come along.", "{a_friend_cap} named {friend} wanted to come too."],
        ["They walked for three days.", "They crossed a river and climbed a hill."],
        ["At the end of the way they found {a_colour} box. Inside was {a_thing}.",
         "There they dug a hole and found {a_thing}."],
        ['"The best treasure is a good friend," said {name}, and they went home together.',
         "They laughed, took it home, and never forgot their adventure."],
    ],
]  # fmt: skip

_SKILLS = ["swim", "dance", "sing", "read", "ride a bike", "bake bread", "play the drum", "jump high", "climb trees",
           "paint", "whistle", "juggle"]  # fmt: skip
_ENDINGS = ["The end.", "", "And they lived happily ever after.", ""]
_POSSIBLE_HOMES = [place for place in PLACES if place not in ("kitchen", "attic")]


def tell(rng: random.Random, who: str, name: str, place: str) -> str:
    """A story of six or seven sentences about `who`, called `name`, in `place`."""
    friend_kind = rng.choice([animal for animal in ANIMALS if animal != who])
    thing, trait = rng.choice(OBJECTS), rng.choice(_TRAITS)
    friend_trait = rng.choice([other for other in _TRAITS if other != trait])
    a_friend = with_article(f"{friend_trait} {friend_kind}")
    fill = {
        "who": who, "name": name, "a_place": with_article(place), "a_trait": with_article(trait), "thing": thing,
        "a_thing": with_article(thing), "a_colour": with_article(rng.choice(COLOURS)), "a_friend": a_friend,
        "a_friend_cap": capitalized(a_friend), "friend": rng.choice([other for other in NAMES if other != name]),
        "skill": rng.choice(_SKILLS), "food": rng.choice(FOODS),
    }  # fmt: skip
    sentences = [rng.choice(_OPENINGS), *(rng.choice(options) for options in rng.choice(_PLOTS)), rng.choice(_ENDINGS)]
    return " ".join(sentence.format(**fill) for sentence in sentences if sentence)


_BEGIN = ["Tell me a {short}story", "Write a {short}story", "Tell a {short}story", "Can you tell me a {short}story",
          "Please write a {short}story", "Write me a {short}story", "I want a {short}story",
          "Give me a {short}story"]  # fmt: skip


def story(rng: random.Random) -> Exchange:
    who, name, place = rng.choice(ANIMALS), rng.choice(NAMES), rng.choice(_POSSIBLE_HOMES)
    _, question = phrase(rng, _BEGIN, short=rng.choice(["short ", "short ", "", "little "]))
    roll, contains = rng.random(), ()
    if roll > 0.12:
        if rng.random() < 0.06:
            question += (
                f" about {who}s"
                if who not in ("wolf", "fish", "sheep", "mouse", "goose", "deer")
                else f" about the {who}"
            )
        else:
            question += f" about {with_article(who)}"
        contains = (who,)
    if roll > 0.45 and rng.random() < 0.6:
        question += rng.choice([" named ", " called "]) + name
        contains = (*contains, name)
    if roll > 0.45 and rng.random() < 0.6:
        question += f" in {rng.choice(['the', 'a']) if place[0] not in 'aeiou' else 'the'} {place}"
        contains = (*contains, place)
    question += "?" if question.startswith("Can") else "."
    answer = tell(rng, who, name, place)
    key = "|".join(contains) if len(contains) > 1 else ""
    return Exchange(((vary(rng, question, keep_case=True), answer),), key=key, contains=contains)


_POEM = [
    "The {subject} is {colour},\nthe sky is blue,\nI wrote this poem\njust for you.",
    "Oh little {subject}, so {trait} and bright,\nyou sing in the day\nand sleep at night.",
    "I saw a {subject} by the sea,\nit looked around and smiled at me.\n"
    "I waved my hand, it waved back too,\nand then it sailed into the blue.",
]


def poem(rng: random.Random) -> Exchange:
    subject = rng.choice(ANIMALS + OBJECTS)
    _, question = phrase(
        rng, ["Write a poem about {a}.", "Write a short poem about {a}.", "Tell me a poem about {a}.",
              "Can you write a poem about {a}?"],
        a=with_article(subject),
    )  # fmt: skip
    answer = rng.choice(_POEM).format(
        subject=subject, colour=rng.choice(COLOURS), trait=rng.choice(["brave", "kind", "clever"])
    )
    answer = answer.replace("a " + subject, with_article(subject))
    return Exchange(((vary(rng, question), answer),), contains=(subject,))
