"""JSON texts that are hard to parse: the files of JSONTestSuite (Nicolas Seriot, MIT; commit 1ef36fa), and generated texts.
They are well-formed, malformed, or left to the parser by RFC 8259. Each is one value, as bytes."""
import pathlib
import tarfile

SUITE = pathlib.Path(__file__).with_name("json_test_suite.tar.gz")

SIMPLE_ESCAPES = "\"\\/bfnrt"
DEEP = 100_000


def suite(kind):
    """Returns the suite's files that parsers must accept (y), must refuse (n), or may accept (i)."""
    with tarfile.open(SUITE) as archive:
        for file in archive:
            if file.name.startswith(f"test_parsing/{kind}_"):
                yield archive.extractfile(file).read()


def well_formed():
    yield from suite("y")
    for sign in (b"", b"-"):
        for whole in (b"0", b"7", b"10", b"123456789"):
            for fraction in (b"", b".0", b".25", b".000001"):
                for exponent in (b"", b"e1", b"E1", b"e+2", b"e-2", b"E00"):
                    yield sign + whole + fraction + exponent
    yield from (b"true", b"false", b"null", b'""', b"[]", b"{}", b'{"":0}', b'{"a":1,"a":2}', b"5e-324", b"1.7976931348623157e308")
    for escape in SIMPLE_ESCAPES:
        yield f'"\\{escape}"'.encode()
    for point in (0x00, 0x1f, 0x20, 0x7f, 0x80, 0xff, 0x7ff, 0x800, 0x2028, 0xd7ff, 0xe000, 0xfdd0, 0xfffe, 0xffff):
        yield f'"\\u{point:04x}\\u{point:04X}"'.encode()
    for point in (0x20, 0x7f, 0x80, 0x7ff, 0x800, 0x2028, 0xd7ff, 0xe000, 0xfeff, 0xfffe, 0xffff, 0x10000, 0x1f600, 0x10ffff):
        yield f'"{chr(point)}"'.encode()
    for point in (0x10000, 0x1f600, 0x10ffff):
        high, low = 0xd800 + (point - 0x10000 >> 10), 0xdc00 + (point - 0x10000 & 0x3ff)
        yield f'"\\u{high:04x}\\u{low:04x}"'.encode()
    for space in (b" ", b"\t", b"\n", b"\r", b" \r\n\t "):
        yield space + b"[" + space + b"1" + space + b"," + space + b'{"a"' + space + b":" + space + b"2}" + space + b"]" + space
    yield b"[" * 20 + b"]" * 20
    yield b'{"a":' * 20 + b"1" + b"}" * 20


def malformed():
    yield from suite("n")
    whole = b'{"a":[1,-2.5e3,"x\\u0041\\n\xc3\xa9",true,null,{"b":{}}],"c":""}'
    for length in range(len(whole)):
        yield whole[:length]
    # A stray letter at each position that allows structure only.
    for place in (0, 1, 4, 5, 6, 7, len(whole) - 1, len(whole)):
        for stray in (b",", b":", b"]", b"}", b"x", b"\\", b"'", b"#", b"\x00", b"\x0b", b"\x0c", b"\xa0", b"\xef\xbb\xbf", b"\xe2\x81\xa0"):
            if place == 0 and stray == b"\xef\xbb\xbf":
                continue  # the parser may accept a byte order mark
            yield whole[:place] + stray + whole[place:]
    yield from (b"+1", b"01", b"-01", b"-", b"1.", b".5", b"-.5", b"1e", b"1e+", b"1E-", b"1.e1", b"1e1.5", b"0x1f", b"1_000", b"1,000",
                b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"inf", b"1f", b"0e", b"--1", b"-a", b"1 2", b"\xef\xbc\x91")
    yield from (b"True", b"FALSE", b"nul", b"nulll", b"undefined", b"tru e", b"'a'", b'"a', b'a"', b"`a`", b'"a""b"', b"[1,]", b"[,1]", b"[1,,2]",
                b"[1;2]", b'{"a",1}', b'{"a":1,}', b"{a:1}", b"{1:1}", b"{null:1}", b'{"a":1 "b":2}', b'{"a"::1}', b"{[]:1}", b"[}", b"{]",
                b"[1]2", b"{}{}", b"[1]//", b"/**/1", b"[1/**/]", b"<1>", b"(1)", b"*", b"@", b"")
    for byte in range(0x20):
        yield b'"a' + bytes([byte]) + b'b"'
    for code in range(0x21, 0x7f):
        if chr(code) not in SIMPLE_ESCAPES + "u":
            yield b'"\\' + bytes([code]) + b'"'
    yield from (b'"\\u"', b'"\\u1"', b'"\\u12"', b'"\\u123"', b'"\\u123g"', b'"\\U0041"', b'"\\u-123"', b'"\\u 123"', b'"\\"', b'"\\\xc3\xa9"')
    for bad in (b"\x80", b"\xbf", b"\xc3", b"\xc3\x28", b"\xe2\x82", b"\xe2\x28\xa1", b"\xf0\x9f\x98", b"\xf0\x28\x8c\xbc", b"\xc0\x80", b"\xc0\xaf",
                b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xfe", b"\xff"):
        yield b'"' + bad + b'"'
        yield b'{"' + bad + b'":1}'
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le"):
        yield '["é"]'.encode(encoding)
    yield from (b"[" * DEEP, b'{"a":' * DEEP, b'[{"":' * DEEP, b"]" * DEEP, b"[" * DEEP + b"]" * (DEEP - 1))


def undecided():
    yield from suite("i")
    yield from (b"1e400", b"-1e400", b"1e-400", b"0." + b"1" * 400, b"1" * 400, b"-" + b"9" * 30, b"18446744073709551616", b"9223372036854775808",
                b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\u0041"', b'"\\udc00\\ud800"', b'"\\ud800\\ud800"', b'"\\uDBFFx"',
                b"[" * DEEP + b"]" * DEEP, b"\xef\xbb\xbf{}", b"{" + b",".join(b'"k%d":1' % i for i in range(5000)) + b"}")
