//! Text for the user.

use std::collections::BTreeMap;

use elasticdl_proto::WorkerId;

/// `text`, truncated to a length that can be stored and shown.
pub(crate) fn clip(text: &str) -> &str {
    let len = (0..=TEXT_BYTES_MAX.min(text.len())).rev().find(|&i| text.is_char_boundary(i));
    &text[..len.expect("0 is a boundary")]
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
pub(crate) fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Formats means for a log line.
pub(crate) fn format_metrics(metrics: &BTreeMap<String, Option<f64>>) -> String {
    let format_metrics = |(name, mean): (&String, &Option<f64>)| match mean {
        Some(mean) => format!("{name} {mean:.4}"),
        None => format!("{name} not finite"),
    };
    metrics.iter().map(format_metrics).collect::<Vec<_>>().join(", ")
}

const TEXT_BYTES_MAX: usize = 4096;
const NAMED_MAX: usize = 8;
