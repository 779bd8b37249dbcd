//! Lines of a log, as a subscriber of `tracing` writes them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Number, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::{Line, LogFormat};
use crate::Generation;

/// Writes the lines of a log in its format, with the time from `T`.
#[derive(Debug)]
pub struct LogLines<T> {
    format: LogFormat,
    source: LogSource,
    time: T,
    text: Format<Full, T>,
}

/// The process that writes a log, as each line in JSON names it.
#[derive(Clone, Debug, Default)]
pub struct LogSource {
    /// Name of the job.
    pub job: Option<String>,
    /// Public id of the run.
    pub run_id: Option<String>,
    /// Number of the worker; `None` for a master.
    pub worker: Option<u64>,
}

impl<T: Clone> LogLines<T> {
    /// Lines in `format` from `source`. `time`: that of the subscriber's own text, RFC 3339.
    #[must_use]
    pub fn new(format: LogFormat, source: LogSource, time: T) -> Self {
        Self { format, source, text: Format::default().with_timer(time.clone()), time }
    }
}

/// Sets the generation that lines in JSON name from now on: the newest one that this process knows.
pub fn set_log_generation(generation: Generation) {
    GENERATION.store(generation.0, Ordering::Relaxed);
}

/// Generation of this process's group; 0 before the first.
static GENERATION: AtomicU64 = AtomicU64::new(0);

impl<S, N, T> FormatEvent<S, N> for LogLines<T>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    T: FormatTime,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if self.format == LogFormat::Text {
            return self.text.format_event(context, writer, event);
        }
        let (mut timestamp, mut fields) = (String::new(), Fields::default());
        self.time.format_time(&mut Writer::new(&mut timestamp))?;
        event.record(&mut fields);
        let LogSource { job, run_id, worker } = self.source.clone();
        let line = Line {
            timestamp,
            level: event.metadata().level().to_string(),
            target: event.metadata().target().into(),
            message: fields.message,
            job,
            run_id,
            worker,
            generation: Some(GENERATION.load(Ordering::Relaxed)).filter(|number| *number > 0),
            fields: fields.others,
        };
        writeln!(writer, "{}", serde_json::to_string(&line).map_err(|_| fmt::Error)?)
    }
}

/// The fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        self.others.insert(field.name().into(), value);
    }
}

impl Visit for Fields {
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            _ => self.add(field, format!("{value:?}").into()),
        }
    }

    /// A number that JSON does not have is a text.
    fn record_f64(&mut self, field: &Field, value: f64) {
        let number = Number::from_f64(value).map(Value::Number);
        self.add(field, number.unwrap_or_else(|| value.to_string().into()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.into(),
            _ => self.add(field, value.into()),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use serde_json::json;
    use tracing_subscriber::fmt::time::SystemTime;

    use super::*;
    use crate::log_line_as_text;

    /// What a log has.
    #[derive(Clone, Debug, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines that `write` logs.
    fn logged(format: LogFormat, source: LogSource, write: impl FnOnce()) -> Vec<String> {
        let log = Log::default();
        let to = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || to.clone())
            .event_format(LogLines::new(format, source, SystemTime))
            .finish();
        tracing::subscriber::with_default(subscriber, write);
        let text = String::from_utf8(std::mem::take(&mut *log.0.lock().unwrap())).unwrap();
        text.lines().map(Into::into).collect()
    }

    fn of_worker() -> LogSource {
        LogSource { job: Some("mnist".into()), run_id: Some("id".into()), worker: Some(3) }
    }

    #[test]
    fn a_line_in_json_names_its_process_and_keeps_the_types_of_fields() {
        set_log_generation(Generation(7));
        let error = io::Error::other("no \"space\"\nleft");
        let lines = logged(LogFormat::Json, of_worker(), || {
            let (count, loss, is_new) = (2_u64, f64::NAN, true);
            tracing::warn!(target: "a::b", %error, count, at = -1, loss, share = 0.5, is_new,
                name = "x", "two\nlines");
        });
        let [line] = &*lines else { panic!("{lines:?}") };
        let mut read: Value = serde_json::from_str(line).unwrap();
        let timestamp = read.as_object_mut().unwrap().remove("timestamp").unwrap();
        let form: String = timestamp.as_str().unwrap().chars().map(digits_as_nines).collect();
        assert_eq!(form, "9999-99-99T99:99:99.999999Z");
        let expected = json!({
            "level": "WARN", "target": "a::b", "message": "two\nlines", "job": "mnist",
            "run_id": "id", "worker": 3, "generation": 7,
            "fields": {
                "error": "no \"space\"\nleft", "count": 2, "at": -1, "loss": "NaN", "share": 0.5,
                "is_new": true, "name": "x",
            },
        });
        assert_eq!(read, expected);
        let text = log_line_as_text(line).unwrap();
        assert!(text.contains("Z WARN a::b: two\nlines at=-1 count=2 error="), "{text}");
        // What is not known is left out.
        let lines = logged(LogFormat::Json, LogSource::default(), || tracing::info!("welcome"));
        let read: Map<String, Value> = serde_json::from_str(&lines[0]).unwrap();
        let keys: Vec<&str> = read.keys().map(String::as_str).collect();
        assert_eq!(keys, ["generation", "level", "message", "target", "timestamp"]);
    }

    fn digits_as_nines(c: char) -> char {
        if c.is_ascii_digit() { '9' } else { c }
    }

    #[test]
    fn text_is_as_it_is_without_a_format() {
        let lines = logged(LogFormat::Text, of_worker(), || tracing::info!(step = 3, "saved"));
        let [line] = &*lines else { panic!("{lines:?}") };
        assert!(line.ends_with("Z  INFO elasticdl_proto::log::lines::tests: saved step=3"));
        assert_eq!(log_line_as_text(line), None);
        assert_eq!(log_line_as_text("{\"loss\": 1}"), None, "a program may print JSON");
    }

    #[test]
    fn an_unknown_format_is_refused_with_those_that_there_are() {
        assert_eq!("json".parse(), Ok(LogFormat::Json));
        assert_eq!("text".parse(), Ok(LogFormat::Text));
        let error = "JSON".parse::<LogFormat>().unwrap_err();
        assert_eq!(error, "`JSON` is no format of logs; it must be json or text");
    }
}
