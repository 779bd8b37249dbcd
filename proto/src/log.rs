//! The logs of masters and workers: text, or JSON, one object per line.

#[cfg(feature = "log")]
mod lines;

use std::fmt::Write as _;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[cfg(feature = "log")]
pub use lines::{LogLines, LogSource, set_log_generation};

/// Form of the lines of a job's logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Text.
    #[default]
    Text,
}

impl LogFormat {
    /// Environment variable with the format of a worker's log.
    pub const VARIABLE: &str = "ELASTICDL_LOG_FORMAT";

    /// Its name, as options and [`LogFormat::VARIABLE`] have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
        }
    }
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Json, Self::Text];
        let named = all.into_iter().find(|format| format.name() == text);
        named.ok_or_else(|| format!("`{text}` is no format of logs; it must be json or text"))
    }
}

/// A line of a log in JSON.
#[derive(Debug, Deserialize, Serialize)]
struct Line {
    timestamp: String,
    level: String,
    target: String,
    message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    worker: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    fields: Map<String, Value>,
}

/// A line of a log in JSON as people read it, for texts that quote a log; `None` for other lines.
#[must_use]
pub fn log_line_as_text(line: &str) -> Option<String> {
    let Line { timestamp, level, target, message, fields, .. } =
        serde_json::from_str(line.strip_prefix(|c| c == '{').map(|_| line)?).ok()?;
    let mut text = format!("{timestamp} {level} {target}: {message}");
    for (name, value) in fields {
        let _ = write!(text, " {name}={value}");
    }
    Some(text)
}
