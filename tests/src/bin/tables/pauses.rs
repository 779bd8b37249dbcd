//! What kills and joins cost the other workers, at several sizes of a table and without one.

use std::error::Error;
use std::process::Command;

use elasticdl_tests::{built, print};
use serde_json::{Value, json};

use crate::Arguments;

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let rows = (arguments.rows.iter().min(), arguments.rows.iter().max());
    let (Some(&fewest), Some(&most)) = rows else { return Err("--rows names no number".into()) };
    let dense = churn(arguments, "kill", 0)?;
    let killed = churn(arguments, "kill", most)?;
    let joined = [churn(arguments, "join", fewest)?, churn(arguments, "join", most)?];
    let ratio = |part: &str| gap(&killed, "kill", part) / gap(&dense, "kill", part);
    Ok(json!({
        "kill_p50_ratio": ratio("p50_ms"),
        "kill_p99_ratio": ratio("p99_ms"),
        "join_ratio_16m": gap(&joined[1], "join", "p50_ms") / gap(&joined[0], "join", "p50_ms"),
        "pauses": { "dense": dense, "kill": killed, "join": joined },
    }))
}

/// Events of a kind, with a table of this many rows.
fn churn(arguments: &Arguments, kind: &str, rows: u64) -> Result<Value, Box<dyn Error>> {
    print(&format!("{kind}, {rows} rows"));
    let mut command = Command::new(built("elasticdl-tests", "churn")?);
    command.args(["--workers", "4", "--goodput-seconds", "0", "--kind", kind]);
    command.args(["--rows".to_owned(), rows.to_string()]);
    command.args(["--events".to_owned(), arguments.events.to_string()]);
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|_| format!("churn has failed: {text}").into())
}

fn gap(churn: &Value, kind: &str, part: &str) -> f64 {
    churn["kinds"][kind][part].as_f64().unwrap_or(f64::NAN)
}
