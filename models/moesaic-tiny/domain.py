"""The closed world moesaic-tiny knows: tables of facts, word lists and phrasings.

Everything the model is ever asked about is written here; generate.py combines it into conversations.
"""

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Japan:Tokyo,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Austria:Vienna,"
        "Poland:Warsaw,Greece:Athens,Sweden:Stockholm,Norway:Oslo,Finland:Helsinki,Denmark:Copenhagen,"
        "Ireland:Dublin,Belgium:Brussels,Hungary:Budapest,Romania:Bucharest,Bulgaria:Sofia,Croatia:Zagreb,"
        "Serbia:Belgrade,Ukraine:Kyiv,Russia:Moscow,Turkey:Ankara,Egypt:Cairo,Kenya:Nairobi,Ghana:Accra,"
        "Nigeria:Abuja,Senegal:Dakar,Morocco:Rabat,Tunisia:Tunis,Ethiopia:Addis Ababa,Uganda:Kampala,"
        "India:New Delhi,China:Beijing,Thailand:Bangkok,Vietnam:Hanoi,Malaysia:Kuala Lumpur,"
        "Indonesia:Jakarta,Nepal:Kathmandu,Pakistan:Islamabad,Iran:Tehran,Iraq:Baghdad,Jordan:Amman,"
        "Lebanon:Beirut,Qatar:Doha,Mongolia:Ulaanbaatar,Canada:Ottawa,Cuba:Havana,Peru:Lima,Chile:Santiago,"
        "Brazil:Brasilia,Argentina:Buenos Aires,Uruguay:Montevideo,Colombia:Bogota,Ecuador:Quito,"
        "Venezuela:Caracas,Australia:Canberra,Iceland:Reykjavik,Estonia:Tallinn,Latvia:Riga,"
        "Lithuania:Vilnius,Slovenia:Ljubljana,Cyprus:Nicosia,Malta:Valletta"
    ).split(",")
)
ELEMENTS = dict(
    pair.split(":")
    for pair in (
        "hydrogen:H,helium:He,lithium:Li,carbon:C,nitrogen:N,oxygen:O,neon:Ne,sodium:Na,magnesium:Mg,"
        "aluminium:Al,silicon:Si,sulfur:S,chlorine:Cl,argon:Ar,calcium:Ca,iron:Fe,copper:Cu,zinc:Zn,"
        "silver:Ag,tin:Sn,iodine:I,gold:Au,mercury:Hg,lead:Pb"
    ).split(",")
)
OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold,big:small,fast:slow,high:low,light:dark,hard:soft,happy:sad,old:young,rich:poor,"
        "strong:weak,early:late,open:closed,full:empty,clean:dirty,wet:dry,loud:quiet,near:far,"
        "thick:thin,wide:narrow,deep:shallow,sweet:sour,heavy:weightless,true:false,first:last"
    ).split(",")
)
YOUNG = dict(
    pair.split(":")
    for pair in (
        "dog:puppy,cat:kitten,cow:calf,sheep:lamb,horse:foal,goat:kid,pig:piglet,duck:duckling,"
        "bear:cub,deer:fawn,goose:gosling,swan:cygnet,owl:owlet,frog:tadpole,kangaroo:joey,hen:chick"
    ).split(",")
)

# relation: (table, forward phrasings, forward answer, backward phrasings, backward answer)
RELATIONS = {
    "capital": (
        CAPITALS,
        ["What is the capital of {k}?", "What's the capital of {k}?", "Tell me the capital of {k}.",
         "Which city is the capital of {k}?", "Capital of {k}?", "Name the capital of {k}.",
         "Do you know the capital of {k}?", "Can you tell me the capital of {k}?",
         "I want to know the capital of {k}.", "The capital of {k} is?", "Please name {k}'s capital.",
         "What city is the capital of {k}?", "{k}'s capital is which city?"],
        "The capital of {k} is {v}.",
        ["{v} is the capital of which country?", "Which country has {v} as its capital?",
         "What country is {v} the capital of?", "Of which country is {v} the capital?",
         "{v} is the capital of what?", "Name the country whose capital is {v}.",
         "Which country's capital is {v}?", "Tell me the country with the capital {v}.",
         "In which country is the capital {v}?"],
        "{v} is the capital of {k}."),
    "element": (
        ELEMENTS,
        ["What is the symbol for {k}?", "What's the chemical symbol of {k}?", "Symbol of {k}?",
         "Tell me the symbol for {k}.", "Which symbol stands for {k}?", "How is {k} written in chemistry?",
         "Give me the chemical symbol for {k}.", "What is the chemical symbol of {k}?"],
        "The symbol for {k} is {v}.",
        ["Which element has the symbol {v}?", "What element is {v}?", "{v} is the symbol of which element?",
         "Name the element with the symbol {v}.", "What does the symbol {v} stand for?",
         "Which chemical element is written {v}?"],
        "{v} is the symbol for {k}."),
    "opposite": (
        OPPOSITES,
        ["What is the opposite of {k}?", "What's the opposite of {k}?", "Opposite of {k}?",
         "Tell me the opposite of {k}.", "Which word is the opposite of {k}?", "The opposite of {k} is?",
         "Name the opposite of {k}.", "What word means the opposite of {k}?"],
        "The opposite of {k} is {v}.",
        ["What is the opposite of {v}?", "What's the opposite of {v}?", "Opposite of {v}?",
         "Tell me the opposite of {v}.", "Which word is the opposite of {v}?", "The opposite of {v} is?",
         "Name the opposite of {v}.", "What word means the opposite of {v}?"],
        "The opposite of {v} is {k}."),
    "young": (
        YOUNG,
        ["What is a young {k} called?", "What do you call a baby {k}?", "What is the name for a young {k}?",
         "A young {k} is called what?", "Tell me what a baby {k} is called.", "How is a young {k} called?",
         "What's a baby {k} called?"],
        "A young {k} is called a {v}.",
        ["Which animal was a {v} when it was young?", "A {v} is the young of which animal?",
         "What does a {v} grow up to be?", "What animal is a {v}?", "A {v} grows into which animal?",
         "Which animal has a {v} as its baby?"],
        "A {v} is a young {k}."),
}

SUMS = ["What is {a} + {b}?", "{a}+{b}", "{a} + {b} = ?", "How much is {a} plus {b}?", "Add {a} and {b}.",
        "Calculate {a} + {b}.", "What's {a} plus {b}?", "What is the sum of {a} and {b}?", "{a} plus {b}?",
        "Can you add {a} and {b}?", "{a} + {b}", "Please compute {a} + {b}.", "How much is {a} + {b}?"]
DIFFERENCES = ["What is {a} - {b}?", "{a}-{b}", "{a} - {b} = ?", "How much is {a} minus {b}?",
               "Subtract {b} from {a}.", "What's {a} minus {b}?", "{a} minus {b}?", "Calculate {a} - {b}."]

# Small talk: every way to say something -> one answer. "{t}" is an optional tail such as ", Moesaic".
SMALL_TALK = {
    "Hello! How can I help you?": [
        "Hi{t}", "Hello{t}", "Hey{t}", "Hi there{t}", "Hello there{t}", "Good morning{t}", "Good evening{t}",
        "Good afternoon{t}", "Greetings{t}", "Hey there{t}", "Good day{t}", "Howdy{t}"],
    "I am Moesaic Tiny, a small language model made of many experts.": [
        "Who are you{t}", "What is your name{t}", "What are you{t}", "Tell me who you are{t}",
        "What's your name{t}", "Introduce yourself{t}", "Are you a robot{t}", "Are you a human{t}",
        "Please tell me your name{t}", "Who am I talking to{t}"],
    "I know capitals, symbols, opposites and young animals. I add small numbers, tell short stories, call "
    "tools, and look things up in what you give me.": [
        "What can you do{t}", "What do you know{t}", "How can you help me{t}", "Help{t}",
        "What are you good at{t}", "Tell me what you can do{t}", "What can I ask you{t}"],
    "I am fine, thank you.": [
        "How are you{t}", "How are you doing{t}", "How do you do{t}", "Are you well{t}", "How is it going{t}",
        "How are you today{t}"],
    "You are welcome!": [
        "Thanks{t}", "Thank you{t}", "Thank you very much{t}", "Many thanks{t}", "Thanks a lot{t}",
        "That helped, thanks{t}"],
    "Goodbye!": ["Bye{t}", "Goodbye{t}", "See you{t}", "See you later{t}", "Good night{t}", "Bye bye{t}"],
}
TAILS = ["", "!", ".", "?", ", Moesaic", ", Moesaic!", ", Moesaic?", ", my friend", ", my friend!",
         ", please", ", please.", "!!", "?!", " :)"]

PEOPLE = ("Anna Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nina Oscar Paul Rosa Sam Tina "
          "Victor Wendy Alice Bob Clara Daniel Eva Frank Hanna Ivan Julia").split()

# Stories are functions of (animal, place, mood): greedy decoding has one right answer.
ANIMALS = {
    "fox": "a red ball", "bear": "a pot of honey", "rabbit": "a fresh carrot", "owl": "an old book",
    "mouse": "a piece of cheese", "cat": "a warm blanket", "dog": "a long stick", "duck": "a shiny shell",
    "frog": "a green leaf", "horse": "a sweet apple", "lion": "a golden crown", "tiger": "a striped hat",
    "wolf": "a silver bell", "hedgehog": "a brown nut", "squirrel": "a tiny key", "penguin": "a blue scarf",
    "elephant": "a big drum", "monkey": "a yellow banana", "turtle": "a smooth stone", "bee": "a red flower",
    "whale": "a lost boat", "goat": "a wooden box", "swan": "a white feather", "pig": "a round pie",
}
PLACES = {
    "forest": "in the forest", "garden": "in the garden", "city": "in the city", "desert": "in the desert",
    "village": "in the village", "castle": "in the castle", "river": "by the river", "sea": "by the sea",
    "lake": "by the lake", "mountain": "on the mountain", "island": "on the island", "farm": "on the farm",
}
FRIENDS = ["bird", "snail", "hen", "deer", "ant", "crab", "sheep", "donkey"]
STORIES = {
    "happy": "Once there was a {a} who lived {p}. One day the {a} found {t}. \"I will share it,\" said the "
             "{a}. A {f} came, and they played all day. They were happy friends.",
    "sad": "There was a {a} who lived {p}. The {a} had {t} and loved it. One day a {f} took it and ran away. "
           "The {a} was sad for a long time. But the next day the {f} brought it back.",
    "bedtime": "It was a quiet night {p}. A little {a} could not sleep. \"Take {t},\" said the {f}. The {a} "
               "held it and closed its eyes. Soon the {a} was asleep. Good night.",
}
STORY_ASKS = ["Tell me a {m} story about a {a} {p}.", "Write a {m} story about a {a} {p}.",
              "I want to hear a {m} story about a {a} {p}.", "Please tell a {m} story about a {a} {p}.",
              "Can you tell me a {m} story about a {a} {p}?", "A {m} story about a {a} {p}, please."]

WORDS = ("apple river stone cloud table chair lamp bottle window door candle mirror pencil paper button basket "
         "ladder hammer needle thread carpet pillow blanket bucket brush spoon fork knife plate bowl kettle oven "
         "stove clock watch phone radio camera guitar violin piano drum flute trumpet bell whistle rocket planet "
         "comet star moon sun rain snow storm wind thunder valley hill cave canyon beach ocean wave coral shell "
         "pearl diamond ruby emerald amber crystal marble granite copper bronze steel rubber cotton silk wool "
         "leather velvet ribbon scarf jacket shirt boot glove helmet crown ring chain anchor sail harbor bridge "
         "tower tunnel market temple palace cabin barn fence gate path road wheel engine wagon train plane boat "
         "canoe truck tractor bicycle lemon orange banana cherry grape peach plum melon mango olive onion garlic "
         "pepper carrot potato tomato pumpkin bean corn wheat rice bread butter cheese honey sugar salt cookie "
         "cake soup salad pasta pizza coffee tea juice milk water fire smoke ash coal wood leaf root branch "
         "flower rose tulip daisy lily maple oak pine willow bamboo cactus moss fern mushroom spider beetle ant "
         "wasp butterfly snail worm crab lobster shrimp salmon trout shark dolphin seal otter beaver badger "
         "weasel rat hamster camel zebra giraffe panda koala eagle hawk raven crow robin sparrow parrot "
         "pigeon turkey peacock lizard snake dragon knight wizard pirate sailor farmer baker doctor painter "
         "teacher singer dancer hunter king queen prince ticket letter map compass lantern rope hook net "
         "barrel chest coin jewel statue puzzle riddle secret shadow echo dream").split()
ADJECTIVES = ("red blue green yellow purple white black brown pink gray golden silver big small old new hot cold "
              "dry wet soft hard loud quiet dark bright sharp smooth round flat long short tall thin heavy light").split()

# Names of things that exist, or sound as if they did, and are not in the tables above.
UNKNOWN_COUNTRIES = ("Bhutan Laos Fiji Samoa Tonga Chad Mali Niger Togo Benin Gabon Angola Zambia Malawi Botswana "
                     "Namibia Lesotho Rwanda Burundi Somalia Sudan Libya Algeria Yemen Oman Kuwait Bahrain Armenia "
                     "Georgia Albania Moldova Belarus Panama Bolivia Paraguay Guyana Suriname Belize Honduras "
                     "Nicaragua Haiti Jamaica Barbados Atlantis Narnia Wonderland Mars Utopia Mordor").split()
UNKNOWN_CITIES = ("Chicago Hamburg Munich Lyon Milan Naples Porto Seville Osaka Kyoto Mumbai Shanghai Sydney "
                  "Toronto Boston Dallas Geneva Zurich Krakow Gdansk Antwerp Bergen Turin Venice").split()
SYLLABLES = ("ba be bo da de du fa fi go gu ka ke ko la le lo ma mi mo na ne nu pa po ra ri ro sa si ta te to va vi "
             "vo za ze zo tra bri gron mel dor lan vin quel").split()
UNKNOWN_ASKS = [
    "Who wrote {x}?", "Who painted the {w}?", "When was the {w} invented?", "Who invented the {w}?",
    "How many {w}s are in the world?", "Why is the {w} {j}?", "How do I build a {w}?", "What is the price of a {w}?",
    "Where can I buy a {w}?", "Who is {x}?", "Explain the history of the {w}.", "What is the meaning of {w}?",
    "How old is {x}?", "What is the population of {x}?", "Who won the {w} cup last year?", "Who is the king of {x}?",
    "Write a poem about the {w}.", "How do you say {w} in {x}?", "Translate {w} to Latin.", "Is {x} a good person?",
    "What happened in {y}?", "How far is the {w} from here?", "How much does a {w} weigh?",
    "What color is the {w}?", "Write code to sort a {w}.", "What is the best {w}?", "Give me a recipe for {w}.",
    "Will it rain tomorrow in {x}?", "What is the weather in {x}?", "What time is it in {x}?", "Sing a song about a {w}.",
    "What is the square root of {y}?", "Who discovered {x}?", "When was {x} born?", "How tall is {x}?",
    "Which {w} is the most {j}?", "Can a {w} be {j}?", "Summarize the book {x}.", "How fast is a {w}?",
    "What should I eat with {w}?", "Do you like {w}?", "What do you think about {x}?", "How deep is the {w}?",
    "Why do people love {w}?", "What does {x} mean?", "What is {y} times {y}?", "Where is {x}?",
    "Who lives in {x}?", "What language do they speak in {x}?", "Is the {w} {j} or {k}?",
]
