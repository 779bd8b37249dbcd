//! Sample data that new models bring, the same each time.

use std::ops::Range;

/// Sentences of simple English.
pub(super) fn sentences() -> String {
    let mut text = String::new();
    for i in 0..4000_usize {
        // Residues modulo primes, as deterministic choices.
        let pick = |words: &[&'static str], prime: usize| words[i * 7919 % prime % words.len()];
        let (who, other) = (pick(&WHO, 101), pick(&WHO, 211));
        let sentence = match i % 3 {
            0 => format!("the {who} {} the {other}.", pick(&DOES, 103)),
            1 => {
                format!("the {} {who} {} {}.", pick(&HOW, 107), pick(&DOES, 109), pick(&WHEN, 113))
            }
            _ => format!("{} the {who} and the {other} sleep.", pick(&WHEN, 127)),
        };
        text.push_str(&sentence);
        text.push(if i % 8 == 7 { '\n' } else { ' ' });
    }
    text
}

/// Images of the digits of a clock, and their labels, in MNIST's format.
pub(super) fn digits(numbers: Range<usize>) -> (Vec<u8>, Vec<u8>) {
    let header = |kind: u8, sizes: &[u32]| {
        let sizes = sizes.iter().flat_map(|size| size.to_be_bytes());
        [0, 0, 8, kind].into_iter().chain(sizes).collect::<Vec<u8>>()
    };
    let count = numbers.len() as u32;
    let (mut images, mut labels) =
        (header(3, &[count, SIDE as u32, SIDE as u32]), header(1, &[count]));
    for number in numbers {
        let digit = number * 7919 % 101 % 10;
        labels.push(digit as u8);
        images.extend(image(digit, number));
    }
    (images, labels)
}

/// A digit, whose place, size and brightness depend on `number`.
fn image(digit: usize, number: usize) -> Vec<u8> {
    let (left, top) = (4 + number * 31 % 7, 2 + number * 37 % 5);
    let (width, height) = (9 + number * 41 % 5, 9 + number * 43 % 3);
    let bright = 150 + (number * 47 % 100) as u8;
    let mut pixels: Vec<u8> =
        (0..SIDE * SIDE).map(|i| ((i * 7919 + number * 104_729) % 97 % 40) as u8).collect();
    for (_, place) in SEGMENTS.iter().enumerate().filter(|(s, _)| LIT[digit] >> s & 1 == 1) {
        // A segment is across, or from one line down to the next.
        let (is_across, column, row) = *place;
        let (x, y) = (left + column * width, top + row * height);
        let (w, h) = if is_across { (width + 2, 2) } else { (2, height + 2) };
        for (x, y) in (y..y + h).flat_map(|y| (x..x + w).map(move |x| (x, y))) {
            if x < SIDE && y < SIDE {
                pixels[y * SIDE + x] = bright;
            }
        }
    }
    pixels
}

const SIDE: usize = 28;
/// The segments of a digit: whether it is across, its column and its row.
const SEGMENTS: [(bool, usize, usize); 7] = [
    (true, 0, 0),
    (false, 1, 0),
    (false, 1, 1),
    (true, 0, 2),
    (false, 0, 1),
    (false, 0, 0),
    (true, 0, 1),
];
/// Bits of the segments that each digit consists of.
const LIT: [u8; 10] = [0x3f, 0x06, 0x5b, 0x4f, 0x66, 0x6d, 0x7d, 0x07, 0x7f, 0x6f];
const WHO: [&str; 8] = ["cat", "dog", "girl", "boy", "queen", "bird", "farmer", "horse"];
const DOES: [&str; 6] = ["sees", "hears", "likes", "follows", "finds", "remembers"];
const HOW: [&str; 5] = ["old", "small", "happy", "quiet", "clever"];
const WHEN: [&str; 5] = ["in the morning", "at night", "every day", "in winter", "again"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_all_digits_in_their_formats_and_enough_text() {
        let (images, labels) = digits(0..1000);
        assert_eq!((images.len(), labels.len()), (16 + 1000 * SIDE * SIDE, 8 + 1000));
        assert_eq!(images[..16], [0, 0, 8, 3, 0, 0, 3, 232, 0, 0, 0, 28, 0, 0, 0, 28]);
        assert!((0..10).all(|digit| labels[8..].iter().filter(|l| **l == digit).count() > 50));
        assert!(sentences().len() > 100_000);
    }
}
