"""Word lists and the random source of names, numbers, codes and text in many scripts."""

import random
import string
from dataclasses import dataclass, field

REAL_NAMES = (
    "Tom Anna Ben Lily Max Sara Leo Mia Sam Nora Jack Emma Finn Ruby Omar Ivy Noah Zoe Adam "
    "Rosa Hugo Lena Karl Vera Ivan Nina Rita Otto Paul Kate Mark Jane Rob Amy Dan Eva Tim "
    "Lucy Bob Alice Carol Dave Peter Mary John Laura Simon Clara Felix Helen Oscar Julia "
    "Victor Sofia Martin Diana Robert Elena David Monica Quentin Wolfgang Xavier Yvonne "
    "Arthur Bianca Cyril Dorothy Edgar Frida Gustav Hannah Igor Jasmine Kevin Linda Miguel "
    "Nadia Oliver Priya Quincy Rachel Stefan Tanya Ursula Vincent Wendy Yusuf Zelda "
    "Charlotte Benjamin Alexander Isabella Theodore"
).split()
ACCENTED_NAMES = (
    "José Zoë Łukasz Søren Chloé André Björn Mónica Jürgen Renée Ğaye Şule Çelik Ñusta Éloïse "
    "Gaël Håkon Pálma Dvořák Žofie Ángel Ümit Inês João François Anaïs Noël Émile Raúl Sofía"
).split()
CITIES = (
    "Paris London Rome Berlin Madrid Oslo Cairo Tokyo Delhi Lima Athens Dublin Milan Vienna Prague "
    "Boston Denver Seoul Lisbon Geneva Dubai Kyoto Chicago Toronto Sydney Hamburg Warsaw Nairobi"
).split()
ACCENTED_CITIES = "Zürich São_Paulo Málaga Kraków Göteborg Orléans Bogotá Tromsø İzmir Łódź".split()
ANIMALS = (
    "cat dog fox bear frog duck owl mouse rabbit horse goat hen cow pig bird fish wolf lion "
    "hedgehog squirrel turtle beaver"
).split()
ADJECTIVES = "little brave kind quiet happy clever old gentle curious sleepy shy proud".split()
COLORS = "red blue green yellow white black brown golden pink gray orange purple".split()
OBJECTS = (
    "ball kite lamp book key hat boat drum bell cup map ring pen car bag shoe coin phone "
    "spoon chair clock rope box flag"
).split()
PLACES = "garden forest village river hill market beach farm park castle bridge harbor".split()
FOODS = "apple bread cheese soup cake honey rice carrot pear pie onion lemon bean plum".split()
JOBS = "teacher doctor farmer baker pilot singer writer driver painter nurse sailor tailor".split()
WEATHER = ["sunny", "rainy", "cloudy", "windy", "snowy", "foggy"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
VERBS = "find get open send make move check start stop read".split()
NOUNS = "item user order file room task note light door report photo event ticket page".split()
PARAMETERS = "id name title city date size color count level path kind code amount".split()
CONSONANTS = "b d f g h j k l m n p r s t v w z".split()
VOWELS = "a e i o u".split()
ENDINGS = ["", "", "", "n", "r", "l", "s", "m"]

ACCENTED = "áàâäãåæçéèêëíìîïñóòôöõøœúùûüýÿßşğıłżźćńśřčšžěůőű"
SCRIPTS = {
    "cyrillic": "абвгдежзийклмнопрстуфхцчшщыьэюя",
    "greek": "αβγδεζηθικλμνξοπρστυφχψω",
    "hebrew": "אבגדהוזחטיכלמנסעפצקרשת",
    "arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "kana": "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめも"
    "アイウエオカキクケコ",
}
SYMBOLS = "€£¥©®°±×÷→←↑↓≤≥≠∞√∑πµ§¶•…–—“”«»½¼★☆♥♦♪✓✗"
EMOJI_RANGES = ((0x1F600, 0x1F64F), (0x1F300, 0x1F3FA), (0x1F400, 0x1F4FC), (0x1F680, 0x1F6C5))
HAN, HANGUL = (0x4E00, 0x9FA5), (0xAC00, 0xD7A3)


def capital(text: str) -> str:
    """First letter upper case."""
    return text[:1].upper() + text[1:]


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return ("an " if word[:1] in "aeiou" else "a ") + word


def join_and(items: list[str]) -> str:
    """a, b and c."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def syllables() -> list[str]:
    """All the syllables that made-up names are built of."""
    return [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]


@dataclass
class Words:
    """Draws names, numbers and text from one random generator.

    blank: names come out empty, for the tokenizer's training text, which should not learn them.
    plain: names only from letters a-z (used by evaluation to separate the scripts).
    drilled: text for a network that has had the drills, which changes how owners are told.
    """

    rng: random.Random
    blank: bool = False
    plain: bool = False
    drilled: bool = False
    name_style: str = field(default="mixed")

    def syllable_name(self, count: int) -> str:
        """A name of consonant-vowel syllables."""
        made = "".join(self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) for _ in range(count))
        return capital(made) + self.rng.choice(ENDINGS)

    def letter_name(self) -> str:
        """A name of random letters."""
        size = self.rng.randrange(4, 9)
        return capital("".join(self.rng.choice(string.ascii_lowercase) for _ in range(size)))

    def accented_name(self) -> str:
        """A known or made-up name with letters beyond a-z."""
        if self.rng.random() < 0.3:
            return self.rng.choice(ACCENTED_NAMES)
        base = list(self.syllable_name(2))
        base[self.rng.randrange(1, len(base))] = self.rng.choice(ACCENTED)
        return "".join(base)

    def drawn(self, known: list[str]) -> str:
        """A name in one of the styles; `known` are the real ones."""
        draw = self.rng.random()
        if self.name_style == "letters":
            return self.letter_name()
        if self.name_style == "syllables":
            return self.syllable_name(self.rng.randrange(2, 5))
        if draw < 0.2:
            return self.rng.choice(known)
        if draw < 0.36:
            return self.letter_name()
        if draw < 0.4 and not self.plain:
            return self.accented_name()
        return self.syllable_name(self.rng.choice([2, 2, 2, 2, 2, 3, 3, 4]))

    def name(self) -> str:
        """A person's name."""
        return "" if self.blank else self.drawn(REAL_NAMES)

    def city(self) -> str:
        """A city's name."""
        if self.blank:
            return ""
        if not self.plain and self.rng.random() < 0.02:
            return self.rng.choice(ACCENTED_CITIES).replace("_", " ")
        return self.drawn(CITIES)

    def names(self, count: int) -> list[str]:
        """Different names."""
        found: list[str] = []
        while len(found) < count:
            name = self.name()
            if self.blank or name not in found:
                found.append(name)
        return found

    def number(self) -> int:
        """Mostly two digits, up to five."""
        draw = self.rng.random()
        if draw < 0.65:
            return self.rng.randrange(2, 100)
        return self.rng.randrange(100, 10_000 if draw < 0.93 else 100_000)

    def word(self) -> str:
        """A common noun or colour."""
        return self.rng.choice(self.rng.choice([ANIMALS, OBJECTS, FOODS, COLORS, PLACES]))

    def code(self) -> str:
        """A key such as K7F2-91 or x3aq9."""
        if self.blank:
            return ""
        letters = self.rng.choice(
            [string.ascii_uppercase, string.ascii_lowercase, "abcdef", string.ascii_uppercase]
        )
        pool = letters + string.digits * 2
        made = "".join(self.rng.choice(pool) for _ in range(self.rng.randrange(4, 9)))
        if self.rng.random() < 0.3:
            made += self.rng.choice("-_.") + str(self.rng.randrange(10, 1000))
        return made

    def foreign(self) -> str:
        """A short piece beyond ASCII: accents, other scripts, CJK, emoji, symbols."""
        if self.blank:
            return ""
        rng = self.rng
        draw = rng.random()
        if draw < 0.25:
            return self.accented_name()
        if draw < 0.3:
            return "".join(rng.choice(ACCENTED) for _ in range(rng.randrange(2, 6)))
        if draw < 0.5:
            return "".join(chr(rng.randint(*HAN)) for _ in range(rng.randrange(1, 6)))
        if draw < 0.56:
            return "".join(chr(rng.randint(*HANGUL)) for _ in range(rng.randrange(1, 5)))
        if draw < 0.8:
            return "".join(
                chr(rng.randint(*rng.choice(EMOJI_RANGES))) for _ in range(rng.randrange(1, 4))
            )
        if draw < 0.85:
            return "".join(rng.choice(SYMBOLS) for _ in range(rng.randrange(1, 4)))
        letters = SCRIPTS[rng.choice(list(SCRIPTS))]
        return "".join(rng.choice(letters) for _ in range(rng.randrange(2, 7)))

    def foreign_text(self) -> str:
        """One to six pieces, at least one beyond ASCII."""
        count = self.rng.randrange(1, 6)
        pieces = [
            self.foreign()
            if self.rng.random() < 0.6
            else self.rng.choice([self.name(), self.word()])
            for _ in range(count)
        ]
        pieces[self.rng.randrange(count)] = self.foreign()
        return " ".join(pieces)
