//! A browser without a window, for tests of the dashboard.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Headless Chromium.
#[derive(Debug)]
pub struct Browser(PathBuf);

impl Browser {
    /// The machine's Chromium.
    pub fn find() -> Self {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::env::split_paths(&folders)
            .flat_map(|folder| NAMES.map(|name| folder.join(name)))
            .find(|path| path.is_file());
        Self(
            paths
                .expect("Chromium is in $PATH: `apt-get install --no-install-recommends chromium`"),
        )
    }

    /// The document at `url` as its scripts have made it.
    pub fn dump(&self, url: &str) -> String {
        self.run(&["--dump-dom", url])
    }

    /// Writes a picture of the document at `url` to `png`.
    pub fn screenshot(&self, url: &str, (width, height): (u32, u32), png: &std::path::Path) {
        let png = format!("--screenshot={}", png.display());
        self.run(&[&png, &format!("--window-size={width},{height}"), url]);
    }

    fn run(&self, arguments: &[&str]) -> String {
        let folder = tempfile::tempdir().expect("there is a place for temporary files");
        let output = std::fs::File::create(folder.path().join("output")).expect("it has room");
        let mut profile = std::ffi::OsString::from("--user-data-dir=");
        profile.push(folder.path().join("profile"));
        let mut process = Command::new(&self.0)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--hide-scrollbars", "--virtual-time-budget=1000"])
            .arg(profile)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let deadline = Instant::now() + Duration::from_secs(120);
        while process.try_wait().expect("a child can be asked for").is_none() {
            if Instant::now() > deadline {
                let _ = process.kill();
                panic!("the browser does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        std::fs::read_to_string(folder.path().join("output")).expect("it was written")
    }
}

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
