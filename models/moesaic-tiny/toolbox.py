"""Tools moesaic-tiny learns to call: schemas under varying names, requests, results and answers about results."""

import domain

ROOMS = "kitchen bedroom bathroom office hall garage garden attic cellar balcony".split()
SONGS = "jazz rock blues opera folk techno swing reggae disco samba".split()
LANGUAGES = "French German Spanish Italian Polish Greek Swedish Dutch Danish Finnish".split()
WEATHER = "sunny cloudy rainy snowy windy foggy stormy clear".split()

CITIES = sorted(domain.CAPITALS.values()) + sorted(domain.UNKNOWN_CITIES)

FILLERS = {
    "city": lambda r: r.choice(CITIES),
    "minutes": lambda r: r.randint(1, 90),
    "room": lambda r: r.choice(ROOMS),
    "genre": lambda r: r.choice(SONGS),
    "person": lambda r: r.choice(domain.PEOPLE),
    "text": lambda r: f"the {r.choice(domain.WORDS)} is {r.choice(domain.ADJECTIVES)}",
    "word": lambda r: r.choice(domain.WORDS),
    "language": lambda r: r.choice(LANGUAGES),
    "people": lambda r: r.randint(2, 12),
    "degrees": lambda r: r.randint(10, 30),
    "item": lambda r: r.choice(domain.WORDS),
    "query": lambda r: f"{r.choice(domain.ADJECTIVES)} {r.choice(domain.WORDS)}",
}
INTEGERS = {"minutes", "people", "degrees"}

# names the tool may go by, description, arguments, requests, result (as keys) and the answer to it
TOOLS = [
    (["get_weather", "weather", "weather_now"], "Get the weather in a city.", ["city"],
     ["What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}.",
      "Is it raining in {city}?", "Weather in {city}?", "What's the weather like in {city}?"],
     ["weather", "temperature"], "It is {weather} in {city}, {temperature} degrees."),
    (["get_time", "clock", "city_time"], "Get the local time in a city.", ["city"],
     ["What time is it in {city}?", "Tell me the time in {city}.", "Time in {city}?",
      "What is the local time in {city}?", "How late is it in {city}?"],
     ["time"], "It is {time} in {city}."),
    (["set_timer", "start_timer", "timer"], "Start a timer.", ["minutes"],
     ["Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
      "Wake me in {minutes} minutes.", "Timer for {minutes} minutes, please.", "I need a {minutes} minute timer."],
     ["status"], "The timer is set for {minutes} minutes."),
    (["light_on", "turn_on_light", "switch_light"], "Turn on the light in a room.", ["room"],
     ["Turn on the light in the {room}.", "Light on in the {room}.", "Switch on the {room} light.",
      "It is dark in the {room}.", "Please light up the {room}."],
     ["status"], "The light in the {room} is on."),
    (["play_music", "music", "start_music"], "Play music of a genre.", ["genre"],
     ["Play some {genre}.", "I want to hear {genre}.", "Put on some {genre} music.", "Play {genre} music, please.",
      "Can you play {genre}?"],
     ["status"], "Playing {genre} now."),
    (["send_message", "message", "send_text"], "Send a message to a person.", ["person", "text"],
     ["Tell {person} that {text}.", "Send {person} a message: {text}", "Write to {person} that {text}.",
      "Message {person}: {text}", "Let {person} know that {text}."],
     ["status"], "I told {person} that {text}."),
    (["translate", "translate_word", "translator"], "Translate a word.", ["word", "language"],
     ["Translate {word} to {language}.", "How do you say {word} in {language}?", "What is {word} in {language}?",
      "Say {word} in {language}.", "Please translate {word} into {language}."],
     ["result"], "{word} in {language} is {result}."),
    (["book_table", "reserve_table", "reservation"], "Book a table in a restaurant.", ["people", "city"],
     ["Book a table for {people} in {city}.", "I need a table for {people} people in {city}.",
      "Reserve a table in {city} for {people}.", "Table for {people} in {city}, please."],
     ["status"], "A table for {people} in {city} is booked."),
    (["set_heating", "heating", "set_temperature"], "Set the heating of a room.", ["room", "degrees"],
     ["Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees.",
      "Make the {room} {degrees} degrees warm.", "I want {degrees} degrees in the {room}."],
     ["status"], "The {room} is set to {degrees} degrees."),
    (["add_item", "shopping_list", "add_to_list"], "Add an item to the shopping list.", ["item"],
     ["Add {item} to my list.", "Put {item} on the shopping list.", "We need {item}.", "I have to buy {item}.",
      "Please add {item} to the list."],
     ["status"], "I added {item} to the list."),
    (["search", "web_search", "find"], "Search the web.", ["query"],
     ["Search for {query}.", "Find {query} on the web.", "Look for {query} online.", "Search the web for {query}.",
      "Google {query}, please."],
     ["hits"], "I found {hits} pages about {query}."),
]


def schema(name: str, description: str, arguments: list[str]) -> dict:
    """One tool as the OpenAI chat API describes it."""
    properties = {a: {"type": "integer" if a in INTEGERS else "string"} for a in arguments}
    return {"type": "function", "function": {
        "name": name, "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(arguments)}}}


def result(rng, keys: list[str]) -> dict:
    """Result of the tool: a value for each key."""
    sample = {"weather": lambda: rng.choice(WEATHER), "temperature": lambda: rng.randint(0, 39),
              "time": lambda: f"{rng.randint(0, 23)}:{rng.randint(0, 5)}{rng.randint(0, 9)}",
              "status": lambda: "ok", "result": lambda: "".join(rng.sample(domain.SYLLABLES, 2)),
              "hits": lambda: rng.randint(2, 99)}
    return {k: sample[k]() for k in keys}
