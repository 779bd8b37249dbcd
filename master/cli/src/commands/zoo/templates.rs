//! The models that `elasticdl zoo init` starts from.

use std::fmt::Write as _;

use clap::ValueEnum;

use super::samples;
use super::source::Source;

/// A model to start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Template {
    /// A transformer that predicts the next character of text files, with candle.
    Charlm,
    /// Click-through prediction with embedding tables that the workers divide, in Criteo's format.
    Ctr,
    /// A line through the points of a CSV file: the smallest model.
    Linear,
    /// A convolutional network for images in MNIST's format, with candle.
    Mnist,
    /// A PyTorch model, as a Python project.
    Python,
    /// Click-through prediction from the categories of a CSV file.
    Tabular,
}

/// The files of a model: paths and contents, with placeholders.
type Files = Vec<(&'static str, String)>;

impl Template {
    /// The files of a model `name` that depends on `source`: paths and contents.
    pub(super) fn files(self, name: &str, source: &Source) -> Vec<(&'static str, Vec<u8>)> {
        let (features, dependencies, files): (&[&str], _, Files) = match self {
            Self::Charlm => (&["candle"], "", charlm()),
            Self::Ctr => (&[], "", ctr()),
            Self::Linear => (&[], "", linear()),
            Self::Mnist => (&["candle"], "", mnist()),
            Self::Python => (&[], "", python()),
            Self::Tabular => (&[], RAND, tabular()),
        };
        let common = if self == Self::Python { Files::new() } else { of_a_crate() };
        let fill = |mut text: String| {
            // A new crate has the tests in its files, but not those in files of the examples.
            text.truncate(text.find("\n#[cfg(test)]\n#[path").unwrap_or(text.len()));
            text.replace("{{name}}", name)
                .replace("{{dependency}}", &source.dependency(features))
                .replace("{{dependencies}}", dependencies)
                .replace("{{package}}", &source.package())
                .replace("{{sources}}", &source.copies())
                .replace("{{command}}", &source.command())
        };
        let files = files.into_iter().chain(common);
        let files = files.map(|(path, text)| (path, fill(text).into_bytes()));
        files.chain(self.images()).collect()
    }

    /// The sample data that is no text.
    fn images(self) -> Vec<(&'static str, Vec<u8>)> {
        if self != Self::Mnist {
            return Vec::new();
        }
        let (train, labels) = samples::digits(0..1000);
        let (test, test_labels) = samples::digits(1000..1200);
        vec![
            ("data/train-images-idx3-ubyte", train),
            ("data/train-labels-idx1-ubyte", labels),
            ("data/t10k-images-idx3-ubyte", test),
            ("data/t10k-labels-idx1-ubyte", test_labels),
        ]
    }
}

fn of_a_crate() -> Files {
    vec![
        ("Cargo.toml", include_str!("../../../templates/crate/Cargo.toml.template").into()),
        ("Dockerfile", include_str!("../../../templates/crate/Dockerfile").into()),
        (".dockerignore", include_str!("../../../templates/crate/dockerignore").into()),
        (".gitignore", include_str!("../../../templates/crate/gitignore").into()),
    ]
}

fn charlm() -> Files {
    vec![
        ("src/main.rs", include_str!("../../../templates/charlm/main.rs").into()),
        ("src/network.rs", include_str!("../../../templates/charlm/network.rs").into()),
        ("src/ops.rs", include_str!("../../../templates/charlm/ops.rs").into()),
        ("data/sentences.txt", samples::sentences()),
        ("README.md", include_str!("../../../templates/charlm/README.md").into()),
    ]
}

fn ctr() -> Files {
    vec![
        ("src/main.rs", include_str!("../../../templates/ctr/main.rs").into()),
        ("src/clicks.rs", include_str!("../../../templates/ctr/clicks.rs").into()),
        ("src/data.rs", include_str!("../../../templates/ctr/data.rs").into()),
        ("src/network.rs", include_str!("../../../templates/ctr/network.rs").into()),
        ("data/train.csv", criteo()),
        ("README.md", include_str!("../../../templates/ctr/README.md").into()),
    ]
}

fn linear() -> Files {
    vec![
        ("src/main.rs", include_str!("../../../templates/linear/main.rs").into()),
        ("data/points.csv", points()),
        ("README.md", include_str!("../../../templates/linear/README.md").into()),
    ]
}

fn mnist() -> Files {
    vec![
        ("src/main.rs", include_str!("../../../templates/mnist/main.rs").into()),
        ("src/network.rs", include_str!("../../../templates/mnist/network.rs").into()),
        ("README.md", include_str!("../../../templates/mnist/README.md").into()),
    ]
}

fn python() -> Files {
    vec![
        ("model.py", include_str!("../../../templates/python/model.py").into()),
        ("train.py", include_str!("../../../templates/python/train.py").into()),
        ("evaluate.py", include_str!("../../../templates/python/evaluate.py").into()),
        ("data/points.csv", points()),
        ("Dockerfile", include_str!("../../../templates/python/Dockerfile").into()),
        (".dockerignore", include_str!("../../../templates/python/dockerignore").into()),
        (".gitignore", include_str!("../../../templates/python/gitignore").into()),
        ("README.md", include_str!("../../../templates/python/README.md").into()),
    ]
}

fn tabular() -> Files {
    vec![
        ("src/main.rs", include_str!("../../../templates/tabular/main.rs").into()),
        ("src/machine.rs", include_str!("../../../templates/tabular/machine.rs").into()),
        ("data/clicks.csv", clicks()),
        ("README.md", include_str!("../../../templates/tabular/README.md").into()),
    ]
}

/// Points near y = 2·x - 0.5, the same each time.
fn points() -> String {
    let mut text = String::from("x,y\n");
    for i in 0..400_i32 {
        let x = f64::from(i) / 200.0 - 1.0;
        // Residues modulo a prime, as deterministic noise.
        let noise = f64::from(i * 7919 % 101 - 50) / 1000.0;
        writeln!(text, "{x:.3},{:.3}", 2.0 * x - 0.5 + noise).expect("a string takes all text");
    }
    text
}

/// Clicks of users on items, the same each time: 1 if both numbers are even or both are odd, but
/// for one row in twenty.
fn clicks() -> String {
    let mut text = String::from("user,item,label\n");
    for i in 0..2000_u32 {
        let (user, item) = (i * 7919 % 101 % 20, i * 104_729 % 103 % 20);
        let label = (user % 2 == item % 2) != (i * 31 % 20 == 0);
        writeln!(text, "u{user},i{item},{}", u8::from(label)).expect("a string takes all text");
    }
    text
}

/// Clicks in Criteo's format, the same each time: 1 if the first category is even.
fn criteo() -> String {
    let mut text = String::new();
    for i in 0..2000_u32 {
        let category = |column: u32| i * (7919 + 2 * column) % (103 + column) % 20;
        write!(text, "{}", 1 - category(0) % 2).expect("a string takes all text");
        for column in 0..13 {
            // One number in six is missing.
            let number = (category(column) % 6 > 0).then(|| category(column).to_string());
            write!(text, "\t{}", number.unwrap_or_default()).expect("a string takes all text");
        }
        for column in 0..26 {
            write!(text, "\t{:08x}", category(column)).expect("a string takes all text");
        }
        text.push('\n');
    }
    text
}

/// Dependency of the template `tabular`.
const RAND: &str =
    "\nrand = { version = \"0.10\", default-features = false, features = [\"chacha\"] }";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_of_the_templates_is_filled() {
        let sources =
            ["0.1", "https://example.com/e.git#v1", concat!(env!("CARGO_MANIFEST_DIR"), "/../..")];
        for (source, template) in
            sources.iter().flat_map(|s| Template::value_variants().iter().map(move |t| (s, t)))
        {
            let source = Source::parse(source).unwrap();
            for (file, bytes) in template.files("my-model", &source) {
                let text = String::from_utf8_lossy(&bytes);
                assert!(
                    !text.contains("{{") && !text.contains("}}"),
                    "{template:?} {file}: {text}"
                );
            }
        }
    }

    #[test]
    fn a_new_crate_has_the_tests_in_its_files_and_none_of_the_examples() {
        let source = Source::parse("0.1").unwrap();
        for template in Template::value_variants() {
            let files = template.files("m", &source);
            let main = files.iter().find(|(path, _)| *path == "src/main.rs");
            let main = main.map_or("", |(_, bytes)| std::str::from_utf8(bytes).unwrap());
            assert!(!main.contains("#[path"), "{template:?}: {main}");
            assert_eq!(main.contains("#[test]"), *template == Template::Linear, "{template:?}");
        }
    }

    #[test]
    fn a_candle_model_asks_for_the_feature() {
        for source in ["0.1", "https://example.com/e.git", "https://example.com/e.git#v1"] {
            let source = Source::parse(source).unwrap();
            let cargo = |template: Template| {
                let files = template.files("m", &source);
                let found = files.into_iter().find(|(path, _)| *path == "Cargo.toml").unwrap();
                String::from_utf8(found.1).unwrap()
            };
            let mnist = cargo(Template::Mnist);
            assert!(mnist.contains("features = [\"candle\"] }\n"), "{mnist}");
            assert!(!cargo(Template::Tabular).contains("candle"), "{source:?}");
        }
    }
}
