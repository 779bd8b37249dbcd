//! The page: its assets, its data, and the report, which is both in one file.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use elasticdl_proto::{Status, Summary};
use ring::digest;
use serde::Serialize;

use super::history::History;
use super::request::ScaleLimits;
use crate::job::format_metrics;

/// What the page shows. The names of its fields are read by the page's scripts.
#[derive(Debug, Serialize)]
pub(crate) struct Page<'a> {
    /// Number of changes of the state that is shown.
    pub(crate) version: u64,
    /// Whether the job runs.
    pub(crate) live: bool,
    /// Age of the job, in seconds.
    pub(crate) at_s: f64,
    pub(crate) status: &'a Status,
    /// Set once the job has ended, in a report.
    pub(crate) summary: Option<&'a Summary>,
    pub(crate) history: &'a History,
    /// `None` if the page can't command the job.
    pub(crate) scale: Option<ScaleLimits>,
}

impl Page<'_> {
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("its keys are strings")
    }
}

/// A file that the server sends as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asset {
    pub(super) path: &'static str,
    pub(super) content_type: &'static str,
    pub(super) text: &'static str,
}

/// The files that the page of the server refers to, and the page itself.
pub(super) fn assets() -> impl Iterator<Item = Asset> {
    let index = Asset { path: "/", content_type: HTML, text: &INDEX_OF_SERVER };
    let styles = STYLES.into_iter().map(|(path, text)| Asset { path, content_type: CSS, text });
    let scripts =
        SCRIPTS.into_iter().map(|(path, text)| Asset { path, content_type: JAVASCRIPT, text });
    std::iter::once(index).chain(styles).chain(scripts)
}

/// The page as one file, without any reference to another one.
pub(super) fn report(page: &Page<'_>) -> String {
    let scripts: Vec<&str> = SCRIPTS.into_iter().map(|(_, text)| text).collect();
    let styles: Vec<&str> = STYLES.into_iter().map(|(_, text)| text).collect();
    let sources = |texts: &[&str]| {
        texts.iter().map(|text| format!("'sha256-{}'", sha256(text))).collect::<Vec<_>>().join(" ")
    };
    let policy = format!(
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; script-src {}; \
         style-src {}",
        sources(&scripts),
        sources(&styles)
    );
    let mut head = format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n");
    head.extend(styles.iter().map(|text| format!("<style>{text}</style>\n")));
    let data = escaped(&page.to_json());
    let mut body = page.summary.map(without_scripts).unwrap_or_default();
    body += &format!("<script type=\"application/json\" id=\"report\">{data}</script>\n");
    body.extend(scripts.iter().map(|text| format!("<script>{text}</script>\n")));
    with_assets(&head, &body).replace("Connecting to the master …", "Report of a job")
}

/// The main numbers of a job, for readers that run no scripts.
fn without_scripts(summary: &Summary) -> String {
    let number = |value: Option<f64>| value.map(|value| value.to_string());
    let best = summary.evaluations.as_ref().and_then(|known| known.best.as_ref());
    let best = best.map(|best| format!("{} {} at step {}", best.metric, best.value, best.step));
    let records = &summary.records;
    let records = format!("{} of {} counted", records.counted, records.expected);
    let metrics = summary.metrics.as_ref().map(format_metrics);
    let rows = [
        ("job", Some(summary.job.clone())),
        ("state", Some(summary.state.to_string())),
        ("error", summary.error.clone()),
        ("seconds", Some(format!("{:.1}", summary.wall_s))),
        ("steps", Some(summary.steps.to_string())),
        ("records", Some(records)),
        ("last loss", number(summary.loss.last)),
        ("best evaluation", best),
        ("metrics", metrics),
    ];
    let cell = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let rows = rows.into_iter().filter_map(|(name, value)| {
        Some(format!("<tr><th>{name}</th><td>{}</td></tr>", cell(&value?)))
    });
    format!("<noscript><table>{}</table></noscript>\n", rows.collect::<String>())
}

/// The page with these elements in its head and at the end of its body.
fn with_assets(head: &str, body: &str) -> String {
    let (before, rest) = INDEX.split_once(STYLES_MARK).expect("the page has a place for styles");
    let (middle, after) = rest.split_once(SCRIPTS_MARK).expect("and one for scripts");
    let licence = format!("<!-- Charts: uPlot\n\n{}-->\n", include_str!("assets/uPlot.LICENSE"));
    [before, &licence, head.trim_end(), middle, body.trim_end(), after].concat()
}

/// JSON that can stand in a `script` element: no text in it ends the element or begins a comment,
/// and it is valid as JavaScript too.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => text.push(c),
        }
    }
    text
}

fn sha256(text: &str) -> String {
    STANDARD.encode(digest::digest(&digest::SHA256, text.as_bytes()))
}

static INDEX_OF_SERVER: LazyLock<String> = LazyLock::new(|| {
    let links = STYLES.map(|(path, _)| format!("<link rel=\"stylesheet\" href=\"{path}\">\n"));
    let scripts = SCRIPTS.map(|(path, _)| format!("<script src=\"{path}\" defer></script>\n"));
    with_assets(&links.concat(), &scripts.concat())
});

const INDEX: &str = include_str!("assets/index.html");
const SCRIPTS_MARK: &str = "<!-- scripts -->";
const STYLES_MARK: &str = "<!-- styles -->";

/// In the order in which they are loaded.
const SCRIPTS: [(&str, &str); 5] = [
    ("/uPlot.js", include_str!("assets/uPlot.iife.min.js")),
    ("/text.js", include_str!("assets/text.js")),
    ("/charts.js", include_str!("assets/charts.js")),
    ("/timeline.js", include_str!("assets/timeline.js")),
    ("/page.js", include_str!("assets/page.js")),
];
const STYLES: [(&str, &str); 2] = [
    ("/uPlot.css", include_str!("assets/uPlot.min.css")),
    ("/page.css", include_str!("assets/page.css")),
];

const CSS: &str = "text/css; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_the_job_does_not_leave_its_script_element() {
        let hostile = "</script><script>alert(1)</script><!--<script>\u{2028}\u{2029}&lt;";
        let status = Status {
            job: hostile.into(),
            state: "completed".into(),
            events: vec![hostile.into()],
            ..Status::default()
        };
        let page = |status| {
            let history = &History::default();
            let page = Page {
                version: 1,
                live: false,
                at_s: 1.0,
                status,
                summary: None,
                history,
                scale: None,
            };
            report(&page)
        };
        let (html, harmless) = (page(&status), page(&Status::default()));
        for mark in ["<script", "</script", "<!--", "\u{2028}", "\u{2029}", "alert(1)<"] {
            let counts = [&html, &harmless].map(|html| html.matches(mark).count());
            assert_eq!(counts[0], counts[1], "{mark}");
        }
        let data = html.split("id=\"report\">").nth(1).unwrap().split("</script>").next().unwrap();
        let read: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!((&read["status"]["job"], &read["live"]), (&hostile.into(), &false.into()));
    }

    #[test]
    fn scripts_and_styles_of_a_report_are_those_that_its_policy_allows() {
        let history = History::default();
        let page = Page {
            version: 1,
            live: false,
            at_s: 1.0,
            status: &Status::default(),
            summary: None,
            history: &history,
            scale: None,
        };
        let html = report(&page);
        for tag in ["script", "style"] {
            let parts: Vec<&str> = html.split(&format!("<{tag}>")).skip(1).collect();
            assert_eq!(parts.len(), if tag == "script" { SCRIPTS.len() } else { STYLES.len() });
            for part in parts {
                let text = part.split(&format!("</{tag}>")).next().unwrap();
                assert!(html.contains(&format!("'sha256-{}'", sha256(text))), "{text:.60}");
            }
        }
        assert!(!html.contains("src=\"") && !html.contains("rel=\"stylesheet\""));
        assert!(!html.contains("unsafe"), "the policy allows what is in the file only");
    }

    #[test]
    fn assets_can_be_inlined_and_load_nothing_from_elsewhere() {
        for Asset { path, text, .. } in assets().filter(|asset| asset.path != "/") {
            for mark in ["</script", "<!--", "</style", "import ", "@import", "url("] {
                assert!(!text.contains(mark), "{path}: {mark}");
            }
        }
        for (path, text) in SCRIPTS.into_iter().filter(|(path, _)| *path != "/uPlot.js") {
            for mark in ["innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "://"] {
                let rest = text.replace("http://www.w3.org/2000/svg", "");
                assert!(!rest.contains(mark), "{path}: {mark}");
            }
        }
    }
}
