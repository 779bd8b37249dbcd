//! Entry points of the fuzzers: what commands read of a job, with any content.
//!
//! A user who may change the ConfigMap of a job, or its directory, decides what the commands of
//! other users read. A command shows the document, or says that it can't be read.

use std::path::Path;

use elasticdl_proto::{Status, Summary};

use super::{Paths, Printer};

/// Shows a status as `status`, `status --json` and `train` do. Returns whether it can be read.
#[must_use]
pub fn status(json: &[u8]) -> bool {
    let Ok(status) = serde_json::from_slice::<Status>(json) else { return false };
    let _ = super::to_table(&status);
    let _ = (status.to_pretty_json(), status.to_json_line());
    let _ = status.clone().into_json_within(64 << 10);
    let mut printer = Printer::new(None);
    printer.show(status.clone());
    printer.show(status);
    printer.end();
    true
}

/// Shows a summary as commands do at the end of a job. Returns whether it can be read.
#[must_use]
pub fn summary(json: &[u8]) -> bool {
    let Ok(summary) = serde_json::from_slice::<Summary>(json) else { return false };
    let paths = Paths { logs: Some(Path::new("logs")), summary: None };
    let _ = (super::summary_to_table(&summary, paths), super::warnings(&summary, false));
    let _ = (summary.to_pretty_json(), summary.into_json_within(128 << 10));
    true
}
