//! Text for the user.

use std::collections::BTreeMap;

use elasticdl_proto::WorkerId;

/// `text`, truncated to a length that can be stored and shown.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

/// A text that has been said in full before.
pub(crate) fn shortened(text: &str) -> String {
    match text.floor_char_boundary(SHORT_BYTES_MAX) {
        end if end < text.len() => format!("{}…", &text[..end]),
        _ => text.to_owned(),
    }
}

/// `worker 3` or `workers 1, 2 and 4`; a long list is truncated.
pub(crate) fn name_all(workers: &[WorkerId]) -> String {
    let shown: Vec<String> = workers.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    match (shown.as_slice(), workers.len() - shown.len()) {
        ([one], 0) => format!("worker {one}"),
        ([first @ .., last], 0) => format!("workers {} and {last}", first.join(", ")),
        (all, more) => format!("workers {} and {more} more", all.join(", ")),
    }
}

/// `1 record`, `8 records`.
pub fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Formats means for a log line.
pub fn format_metrics(metrics: &BTreeMap<String, Option<f64>>) -> String {
    let format_metrics = |(name, mean): (&String, &Option<f64>)| match mean {
        Some(mean) => format!("{name} {}", format_value(*mean)),
        None => format!("{name} not finite"),
    };
    metrics.iter().map(format_metrics).collect::<Vec<_>>().join(", ")
}

/// Formats a loss or another mean: four decimals, or in scientific form if it is huge.
pub fn format_value(value: f64) -> String {
    if value.abs() < HUGE { format!("{value:.4}") } else { format!("{value:.4e}") }
}

const HUGE: f64 = 1e6;
const TEXT_BYTES_MAX: usize = 4096;
const NAMED_MAX: usize = 8;
const SHORT_BYTES_MAX: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_shortened_where_a_character_begins() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(shortened(&format!("x{}", "é".repeat(80))), format!("x{}…", "é".repeat(79)));
    }

    #[test]
    fn a_huge_value_is_in_scientific_form() {
        let values = [0.5, -12.0, 999_999.0, 2.293_797_7e31, -1e6, f64::NAN];
        let texts = ["0.5000", "-12.0000", "999999.0000", "2.2938e31", "-1.0000e6", "NaN"];
        assert_eq!(values.map(format_value), texts);
    }
}
