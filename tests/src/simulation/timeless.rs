//! Numbers that stand for values, whatever the times in them are.

use std::fmt::{Debug, Write as _};

/// Two sequences of values have the same number if their texts are the same, apart from times,
/// rates, and versions of records. Hashes of 64 bits (FNV-1a) are taken for equal texts.
#[derive(Debug)]
pub(super) struct Timeless {
    number: u64,
    text: String,
}

impl Default for Timeless {
    fn default() -> Self {
        Self { number: 0xcbf2_9ce4_8422_2325, text: String::new() }
    }
}

impl Timeless {
    /// The number of one value.
    pub(super) fn number_of(value: &dyn Debug) -> u64 {
        let mut one = Self::default();
        one.add(value);
        one.number
    }

    /// Adds a value by its text.
    pub(super) fn add(&mut self, value: &dyn Debug) {
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        // A string takes all text.
        let _ = write!(text, "{value:?};");
        self.add_text(text.as_bytes());
        self.text = text;
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    fn add_text(&mut self, text: &[u8]) {
        let mut at = 0;
        let mut field: &[u8] = b"";
        while let Some(&first) = text.get(at) {
            let rest = &text[at..];
            let len = match first {
                b'A'..=b'Z' | b'a'..=b'z' | b'_' => {
                    let name = &rest[..length(rest, |b| b.is_ascii_alphanumeric() || b == b'_')];
                    if name == REPORTING {
                        at += whole(rest);
                        continue;
                    }
                    // A number in a variant or a newtype is that of the field.
                    if !first.is_ascii_uppercase() {
                        field = name;
                    }
                    name.len()
                }
                b'0'..=b'9' => {
                    let (len, is_rounded) = number(rest);
                    if is_rounded || LEFT_OUT.iter().any(|end| field.ends_with(end)) {
                        at += len;
                        continue;
                    }
                    len
                }
                _ => 1,
            };
            for byte in &rest[..len] {
                self.number = (self.number ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
            }
            at += len;
        }
    }
}

/// Number of the first bytes that are all such.
fn length(text: &[u8], is: impl Fn(u8) -> bool) -> usize {
    text.iter().position(|&byte| !is(byte)).unwrap_or(text.len())
}

/// Length of a number, and whether it is a duration or has decimals.
fn number(text: &[u8]) -> (usize, bool) {
    let digits = |from: usize| from + length(&text[from..], |byte| byte.is_ascii_digit());
    let mut len = digits(0);
    let is_decimal = text.get(len) == Some(&b'.') && digits(len + 1) > len + 1;
    if is_decimal {
        len = digits(len + 1);
    }
    let units = ["ns", "\u{b5}s", "ms", "s"];
    let unit = units.iter().find(|unit| text[len..].starts_with(unit.as_bytes()));
    (len + unit.map_or(0, |unit| unit.len()), is_decimal || unit.is_some())
}

/// Length of a struct in braces.
fn whole(text: &[u8]) -> usize {
    let mut depth = 0;
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

/// The part of a job that decides nothing.
const REPORTING: &[u8] = b"JobHistory";

/// Ends of the names of fields with times, with what grows with each event, and with numbers of
/// links.
const LEFT_OUT: [&[u8]; 10] = [
    b"_at",
    b"_ms",
    b"_nsec",
    b"_sec",
    b"_us",
    b"durable_before",
    b"link",
    b"pause",
    b"since",
    b"version",
];
