"""Exact regular expressions for the values of ``format`` that JSON schema defines.

The expressions are the project's own, written from the RFCs. Each is exact or narrower than its RFC
(the note says how), never wider: a text that it matches is of the format under every reading. Names
that JSON schema does not define are annotations, as the specification says, and constrain nothing.
"""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY_OF_YEAR = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_OCTET}(?:\\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [f"(?:{_H16}:){{6}}{_LS32}", f"::(?:{_H16}:){{5}}{_LS32}"]
    + [
        f"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?::(?:{_H16}:){{{5 - before}}}{_LS32}"
        for before in range(1, 6)
    ]
    + [f"(?:{_H16}(?::{_H16}){{0,5}})?::{_H16}", f"(?:{_H16}(?::{_H16}){{0,6}})?::"]
) + ")"  # fmt: skip

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_PLAIN_LABEL = (
    "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,2}[A-Za-z0-9]"
    "|[A-Za-z0-9\\-](?:[A-Za-z0-9][A-Za-z0-9\\-]|-[A-Za-z0-9])[A-Za-z0-9\\-]{0,58}[A-Za-z0-9])?"
)
"""At most 63 characters, and the third and fourth are not both hyphens."""
_ATOM = "[A-Za-z0-9!#$%\\&'*+/=?\\^_`\\{\\|\\}~\\-]+"

_PERCENT = "%[0-9A-Fa-f]{2}"
_UNRESERVED = "A-Za-z0-9\\-._~"
_SUB_DELIMS = "!$\\&'()*+,;="


def _uri(beyond_ascii: str) -> tuple[str, str]:
    """(URI or IRI, reference) of RFC 3986 and 3987; IP literals are IPv6 addresses."""
    pchar = f"(?:[{_UNRESERVED}{_SUB_DELIMS}:@{beyond_ascii}]|{_PERCENT})"
    segment_no_colon = f"(?:[{_UNRESERVED}{_SUB_DELIMS}@{beyond_ascii}]|{_PERCENT})+"
    userinfo = f"(?:(?:[{_UNRESERVED}{_SUB_DELIMS}:{beyond_ascii}]|{_PERCENT})*@)?"
    name = f"(?:[{_UNRESERVED}{_SUB_DELIMS}{beyond_ascii}]|{_PERCENT})*"
    authority = f"//{userinfo}(?:{name}|\\[{_IPV6}\\])(?::[0-9]*)?(?:/{pchar}*)*"
    absolute = f"/(?:{pchar}+(?:/{pchar}*)*)?"
    rootless = f"{pchar}+(?:/{pchar}*)*"
    relative = f"{segment_no_colon}(?:/{pchar}*)*"
    tail = f"(?:\\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    scheme = "[A-Za-z][A-Za-z0-9+.\\-]*:"
    full = f"{scheme}(?:{authority}|{absolute}|{rootless})?{tail}"
    return full, f"(?:{full}|(?:{authority}|{absolute}|{relative})?{tail})"


_URI, _URI_REFERENCE = _uri("")
_IRI, _IRI_REFERENCE = _uri("\\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef")
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

_EXACT = {
    "date": _DATE,
    "time": _TIME,  # narrower: no leap seconds
    "date-time": f"{_DATE}[Tt]{_TIME}",  # narrower: no leap seconds
    "duration": _DURATION,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "email": f"{_ATOM}(?:\\.{_ATOM})*@{_LABEL}(?:\\.{_LABEL})*",  # narrower: no quotes, no address literals
    "hostname": f"{_PLAIN_LABEL}(?:\\.{_PLAIN_LABEL})*",  # narrower: nothing in the shape of punycode
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,  # narrower: no characters beyond the basic plane
    "iri-reference": _IRI_REFERENCE,  # as iri
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
_EXACT["idn-email"] = _EXACT["email"]  # narrower: ASCII only
_EXACT["idn-hostname"] = _EXACT["hostname"]  # narrower: ASCII only

DEFINED = frozenset([*_EXACT, "uri-template", "regex"])
"""JSON schema 2020-12, validation, section 7.3."""
LENGTHS = {"hostname": 253, "idn-hostname": 253, "email": 254, "idn-email": 254}
"""Most characters of a value, where a format limits them."""


def format_pattern(name: str) -> str | None:
    """A pattern of the strings of a format, or of nearly all of them; None if there is none."""
    expression = _EXACT.get(name)
    return None if expression is None else f"^(?:{expression})$"
