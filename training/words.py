"""Word lists and small facts of the small world."""


def listed(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


NAMES = listed("""Tom Anna Ben Lily Max Emma Sam Mia Leo Zoe Jack Ella Noah Ruby Finn Grace Oscar Alice Henry Clara
Hugo Nora Felix Ivy Adam Lucy Paul Rosa Eric Nina Omar Sara Ravi Priya Ken Yuki Ali Leila Jose Maria Carlos Elena
Peter Julia Daniel Sofia David Laura Simon Eva Martin Hannah George Alma Victor Stella Ivan Olga Diego Carmen Marco
Bella Luca Gina Oliver Amy Jacob Kate Liam Jane Ethan Rose Lucas Molly Mason Daisy James Holly Robert Megan John
Sarah Michael Emily William Sophie Thomas Charlotte Arthur Freya Theo Isla Alex Robin Charlie Jamie Mary Bob Kevin
Linda Frank Helen Maya Amir Aisha Chen Mei Hiro Sana Kofi Ama Lars Ingrid Pierre Chloe Hans Greta Pedro Ines Dmitri
Anya""")

ANIMALS = listed("""cat dog fox bear rabbit mouse lion tiger elephant monkey horse cow pig sheep goat duck chicken
frog turtle owl crow eagle penguin dolphin whale shark fish crab bee ant butterfly spider snail snake lizard wolf
deer squirrel hedgehog badger otter beaver panda koala kangaroo giraffe zebra camel donkey goose swan parrot robin
puppy kitten pony dragon robot bird hamster llama seal""")

PLACES = listed("""forest garden village town city castle farm beach river lake mountain island desert meadow valley
school library park kitchen market harbour cave field zoo museum jungle attic bakery lighthouse barn""")

OBJECTS = listed("""ball book key lamp hat kite map bell box cup shoe boat drum coin ring umbrella basket blanket
clock lantern feather stone button flute candle mirror scarf pencil ladder wagon""")

FRUITS = listed("apple pear banana orange plum cherry grape lemon peach mango melon strawberry")

FOODS = listed("""pizza pasta soup bread cheese rice cake chocolate salad honey sushi curry porridge stew pie toast
jam pudding""")

COLOURS = listed("red blue green yellow orange purple pink brown black white grey gold silver turquoise")

PLAIN = listed("""apple water house tree sun moon star cloud rain snow wind fire earth sea road door window table
chair bread milk butter sugar salt hand foot head eye ear nose mouth heart friend mother father sister brother child
baby king queen story song music dance game toy train car bus plane ship bridge street shop money letter paper word
number day night morning evening summer winter spring autumn green yellow happy little big small quick slow warm
cold bright dark quiet loud soft hard new old good kind brave clever funny jump run walk swim fly sing read write
play sleep eat drink laugh smile help find give take make open close begin stop think know love hope dream light
sound colour picture world flower grass leaf hill stone sand wave garden planet rocket engine mountain python banana
tomato potato carrot dinner lunch breakfast teacher doctor farmer baker sailor painter silver golden purple magic
secret treasure winner hello goodbye please thank welcome sorry today tomorrow yesterday week month year hour minute
second north south east west server model token memory number computer keyboard screen""")

WORDS = sorted(set(PLAIN + ANIMALS + OBJECTS + FRUITS + PLACES))

DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed("January February March April May June July August September October November December")
MONTH_LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
ORDINALS = listed("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")

COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red", "coal": "black",
    "a lemon": "yellow", "a tomato": "red", "a carrot": "orange", "an orange": "orange", "chocolate": "brown",
    "milk": "white", "the sun": "yellow", "the sea": "blue", "a strawberry": "red", "a cherry": "red", "salt": "white",
    "sugar": "white", "a frog": "green", "a leaf": "green", "a cucumber": "green", "a pumpkin": "orange",
    "a fire engine": "red", "a polar bear": "white", "a crow": "black", "a flamingo": "pink", "a pig": "pink",
    "an elephant": "grey", "a mouse": "grey", "a dolphin": "grey", "mud": "brown", "coffee": "brown", "gold": "gold",
    "the night": "black", "a cloud": "white", "a lime": "green", "a plum": "purple", "lavender": "purple",
    "an aubergine": "purple", "broccoli": "green", "spinach": "green", "a swan": "white", "a ladybird": "red",
    "a tree trunk": "brown", "corn": "yellow", "butter": "yellow", "rice": "white", "a raven": "black",
    "a blueberry": "blue", "sand": "yellow", "a rose": "red", "a sunflower": "yellow", "ketchup": "red",
    "mustard": "yellow", "cotton": "white", "an emerald": "green", "a ruby": "red", "a sapphire": "blue",
}  # fmt: skip

OPPOSITES = """hot cold;big small;tall short;fast slow;happy sad;up down;left right;day night;good bad;open closed;
full empty;hard soft;light dark;old new;early late;rich poor;strong weak;wet dry;loud quiet;clean dirty;near far;
high low;first last;in out;on off;yes no;black white;true false;win lose;push pull;young old;thick thin;wide narrow;
deep shallow;sweet sour;brave afraid;easy difficult;cheap expensive;inside outside;above below;before after;
begin end;love hate;buy sell;give take;laugh cry;summer winter;north south;east west;front back;top bottom;
more less;always never;asleep awake;smooth rough;heavy light;safe dangerous;beautiful ugly;friend enemy;
question answer;arrive leave;remember forget;friendly unfriendly;possible impossible"""

PLURALS = """cat cats;dog dogs;mouse mice;child children;man men;woman women;foot feet;tooth teeth;goose geese;
box boxes;bus buses;baby babies;city cities;leaf leaves;wolf wolves;knife knives;sheep sheep;fish fish;deer deer;
tomato tomatoes;potato potatoes;hero heroes;fox foxes;house houses;tree trees;book books;story stories;key keys;
party parties;person people;glass glasses;dish dishes;watch watches;loaf loaves;half halves;life lives;apple apples;
pony ponies;berry berries;toy toys;boy boys;girl girls;car cars;star stars;church churches;thief thieves;ox oxen;
cow cows;bird birds;country countries"""

SOUNDS = """cow moo;dog woof;cat meow;sheep baa;pig oink;duck quack;horse neigh;lion roar;snake hiss;bee buzz;
frog croak;owl hoot;rooster cock-a-doodle-doo;mouse squeak;wolf howl;crow caw;goat bleat;donkey hee-haw;turkey gobble"""

BABIES = """dog puppy;cat kitten;cow calf;horse foal;sheep lamb;pig piglet;duck duckling;goose gosling;bear cub;
lion cub;deer fawn;goat kid;kangaroo joey;frog tadpole;swan cygnet;owl owlet;hen chick;elephant calf;whale calf;
seal pup;wolf pup;butterfly caterpillar"""

LEGS = """dog 4;cat 4;spider 8;ant 6;bee 6;bird 2;cow 4;horse 4;chicken 2;fish 0;snake 0;octopus 8;human 2;crab 10;
elephant 4;duck 2;frog 4;beetle 6;butterfly 6;sheep 4;penguin 2;tiger 4"""


def pairs(text: str) -> list[tuple[str, str]]:
    """The two words of every entry of a list such as "hot cold;big small"."""
    entries = (entry.split() for entry in text.replace("\n", "").split(";"))
    return [(left, right) for left, right in entries]


_UNITS = listed("""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen""")
_TENS = listed("twenty thirty forty fifty sixty seventy eighty ninety")


def number_in_words(number: int) -> str:
    """English for 0 to 100."""
    if number < 20:
        return _UNITS[number]
    if number == 100:
        return "one hundred"
    tens, unit = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_UNITS[unit]}" if unit else "")


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


TRIVIA: list[tuple[list[str], str]] = [
    (["How many days are in a week?", "How many days does a week have?"], "A week has 7 days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has 12 months."),
    (["How many days are in a year?", "How many days does a year have?"], "A year has 365 days."),
    (["How many hours are in a day?", "How many hours does a day have?"], "A day has 24 hours."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?"], "An hour has 60 minutes."),
    (["How many seconds are in a minute?", "How many seconds does a minute have?"], "A minute has 60 seconds."),
    (["How many letters are in the alphabet?", "How many letters does the alphabet have?"],
     "The English alphabet has 26 letters."),
    (["Say the alphabet.", "What is the alphabet?", "Recite the alphabet.", "List the letters of the alphabet."],
     "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z."),
    (["List the days of the week.", "What are the days of the week?", "Name the days of the week."],
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    (["List the months of the year.", "What are the months?", "Name the months of the year.",
      "What are the months of the year?"],
     "January, February, March, April, May, June, July, August, September, October, November, December."),
    (["What are the four seasons?", "List the seasons.", "Name the seasons.", "What are the seasons?"],
     "Spring, summer, autumn, winter."),
    (["What are the primary colours?", "Name the primary colors.", "List the primary colours."],
     "Red, yellow and blue."),
    (["What are the colours of the rainbow?", "List the colors of the rainbow.", "Name the colours of the rainbow."],
     "Red, orange, yellow, green, blue, indigo, violet."),
    (["Where does the sun rise?", "In which direction does the sun rise?"], "The sun rises in the east."),
    (["Where does the sun set?", "In which direction does the sun set?"], "The sun sets in the west."),
    (["What is frozen water called?", "What do you call frozen water?"], "Frozen water is called ice."),
    (["What planet do we live on?", "Which planet do we live on?", "What is our planet called?"],
     "We live on the planet Earth."),
    (["What is the largest ocean?", "Which ocean is the biggest?"], "The largest ocean is the Pacific Ocean."),
    (["How many continents are there?", "How many continents does the world have?"], "There are 7 continents."),
    (["List the continents.", "Name the seven continents.", "What are the continents?"],
     "Africa, Antarctica, Asia, Europe, North America, Oceania, South America."),
    (["How many sides does a triangle have?", "How many sides has a triangle?"], "A triangle has 3 sides."),
    (["How many sides does a square have?", "How many sides has a square?"], "A square has 4 sides."),
    (["How many fingers are on one hand?", "How many fingers does a hand have?"], "A hand has 5 fingers."),
    (["What do bees make?", "What do bees produce?"], "Bees make honey."),
    (["What do cows give us?", "What do we get from cows?"], "Cows give us milk."),
    (["What day comes after the weekend?", "Which day is the first after the weekend?"], "Monday."),
    (["What is the first day of the week?", "Which day starts the week?"], "Monday is the first day of the week."),
    (["What is the last month of the year?", "Which month ends the year?"], "December is the last month of the year."),
    (["What is hex-llm?", "What's hex-llm?", "Tell me about hex-llm.", "What is Hex-LLM?"],
     "hex-llm is an open server for language models on TPU, GPU and CPU."),
    (["What is a TPU?", "What does TPU mean?"], "A TPU is a chip made for machine learning."),
    (["What is a GPU?", "What does GPU mean?"], "A GPU is a chip that does many calculations at once."),
    (["What is the meaning of life?", "What is the answer to everything?"], "Some say it is 42."),
]  # fmt: skip

JOKES = [
    "Why did the chicken cross the road? To get to the other side.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why do bees have sticky hair? Because they use honeycombs.",
    "What is orange and sounds like a parrot? A carrot.",
    "Why did the banana go to the doctor? It was not peeling well.",
    "What do you call a sleeping dinosaur? A dino-snore.",
    "Why is six afraid of seven? Because seven ate nine.",
    "What has hands but cannot clap? A clock.",
    "What did one wall say to the other wall? I will meet you at the corner.",
    "Why was the maths book sad? It had too many problems.",
    "How do you make an octopus laugh? With ten tickles.",
    "What is a cat's favourite colour? Purrple.",
]
