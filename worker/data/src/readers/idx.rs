//! Labeled images in MNIST's IDX format.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::files;
use crate::reader::{Access, DataError, Dataset, File, Reader};

/// Reads labeled images from a pair of IDX files: images with one byte per pixel, and one byte per
/// label.
///
/// The source is either a folder that contains `train-images-idx3-ubyte` and
/// `train-labels-idx1-ubyte`, as MNIST and its successors are distributed (decompressed), or two
/// files as `images,labels`.
///
/// The format: LeCun, Cortes & Burges, The MNIST database of handwritten digits.
#[derive(Clone, Debug)]
pub struct IdxImages {
    rows: u32,
    columns: u32,
}

/// An image and its class.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LabeledImage {
    /// The pixels, `[rows · columns]`, row by row.
    pub pixels: Vec<u8>,
    /// The class.
    pub label: u8,
}

/// Sizes that the header of an IDX file declares, validated against the file's length.
struct Shape {
    records: u32,
    /// Bytes before the first record.
    start: u64,
}

impl IdxImages {
    /// Creates a reader for images of `rows` by `columns` pixels: 28 by 28 for MNIST.
    ///
    /// # Panics
    /// If one of them is 0.
    pub fn new(rows: u32, columns: u32) -> Self {
        assert!(rows > 0 && columns > 0, "an image has at least one pixel");
        Self { rows, columns }
    }

    fn pixels(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.columns)
    }

    /// Validates both files. Returns the number of records and the offset of the first record in
    /// each.
    fn shapes(&self, images: &Path, labels: &Path) -> Result<[Shape; 2], DataError> {
        let shapes = [shape(images, &[self.rows, self.columns])?, shape(labels, &[])?];
        let [of_images, of_labels] = [shapes[0].records, shapes[1].records];
        if of_images != of_labels {
            let reason =
                format!("{of_labels} labels for the {of_images} images of {}", images.display());
            return Err(files::malformed(labels, &reason));
        }
        Ok(shapes)
    }
}

impl Reader for IdxImages {
    type Record = LabeledImage;

    /// Describes one file, whose path is the path of the images, a comma, and the path of the
    /// labels.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let (images, labels) = pair(source)?;
        let [shape, _] = self.shapes(&images, &labels)?;
        let path = format!("{},{}", files::text(&images)?, files::text(&labels)?);
        let version = Some(files::version(&[&images, &labels])?);
        let records = shape.records.into();
        let dataset = Dataset::new(vec![File { path, records, version }]);
        files::not_empty(source, dataset, "no image")
    }

    fn access(&self, dataset: &Dataset) -> Access {
        files::access(dataset, self.pixels())
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<LabeledImage>, DataError> {
        let (images, labels) = pair(&file.path)?;
        files::check(file, &[&images, &labels])?;
        let [of_images, of_labels] = self.shapes(&images, &labels)?;
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let (size, count) = (self.pixels(), range.end - range.start);
        let start = range.start.saturating_mul(size).saturating_add(of_images.start);
        let pixels = files::read(&images, start, count.saturating_mul(size))?;
        let classes = files::read(&labels, range.start.saturating_add(of_labels.start), count)?;
        // The pixels fit into memory, so an image, which is not longer, fits into a usize.
        let records = pixels.chunks_exact(size as usize).zip(classes);
        Ok(records.map(|(pixels, label)| LabeledImage { pixels: pixels.to_vec(), label }).collect())
    }

    fn read_records(
        &mut self,
        file: &File,
        records: &[u64],
    ) -> Result<Vec<LabeledImage>, DataError> {
        let (images, labels) = pair(&file.path)?;
        files::check(file, &[&images, &labels])?;
        let [of_images, of_labels] = self.shapes(&images, &labels)?;
        let places = |size: u64, start: u64| {
            records.iter().map(move |record| record.saturating_mul(size).saturating_add(start))
        };
        let size = self.pixels();
        let pixels = files::read_each(&images, places(size, of_images.start), size)?;
        let classes = files::read_each(&labels, places(1, of_labels.start), 1)?;
        let records = pixels.into_iter().zip(classes);
        Ok(records.map(|(pixels, class)| LabeledImage { pixels, label: class[0] }).collect())
    }
}

/// Paths of the images and of the labels that `source` names.
fn pair(source: &str) -> Result<(PathBuf, PathBuf), DataError> {
    let right = "give a folder or two files as images,labels";
    let pair: Vec<&str> = source.split(',').collect();
    match *pair {
        [folder] if files::is_folder(folder)? => {
            Ok((Path::new(folder).join(IMAGES), Path::new(folder).join(LABELS)))
        }
        [images, labels] if !images.is_empty() && !labels.is_empty() => {
            Ok((images.into(), labels.into()))
        }
        [path] => {
            files::length(Path::new(path))?;
            Err(files::malformed(Path::new(path), &format!("one file: {right}")))
        }
        _ => {
            let reason = format!("{} commas where one should be: {right}", pair.len() - 1);
            Err(files::malformed(Path::new(source), &reason))
        }
    }
}

/// Validates an IDX file with records of the shape `inner`, whose elements are unsigned bytes.
fn shape(path: &Path, inner: &[u32]) -> Result<Shape, DataError> {
    let length = files::length(path)?;
    let start = 4 + 4 * (inner.len() as u64 + 1);
    let head = files::read(path, 0, length.min(start))?;
    if head.starts_with(&[0x1f, 0x8b]) {
        return Err(files::malformed(path, "compressed with gzip: decompress it first"));
    }
    let magic = [0, 0, UNSIGNED_BYTE, inner.len() as u8 + 1];
    if !head.starts_with(&magic) {
        let found = hex(&head[..head.len().min(4)]);
        let reason =
            format!("begins with {found} where the IDX magic number {} should be", hex(&magic));
        return Err(files::malformed(path, &reason));
    }
    if length < start {
        let reason = format!("{length} bytes where the header alone has {start}");
        return Err(files::malformed(path, &reason));
    }
    let mut sizes = head[4..]
        .chunks_exact(4)
        .map(|size| u32::from_be_bytes([size[0], size[1], size[2], size[3]]));
    let records = sizes.next().expect("the header has one size more than `inner`");
    let found: Vec<u32> = sizes.collect();
    if found != inner {
        let reason =
            format!("images of {} pixels where they should be of {}", times(&found), times(inner));
        return Err(files::malformed(path, &reason));
    }
    let wanted = inner.iter().fold(u128::from(records), |bytes, &size| bytes * u128::from(size))
        + u128::from(start);
    if u128::from(length) != wanted {
        let reason =
            format!("{length} bytes where the {records} records that it declares need {wanted}");
        return Err(files::malformed(path, &reason));
    }
    Ok(Shape { records, start })
}

fn hex(bytes: &[u8]) -> String {
    match bytes {
        [] => "nothing".to_owned(),
        _ => bytes.iter().fold("0x".to_owned(), |text, byte| text + &format!("{byte:02x}")),
    }
}

fn times(sizes: &[u32]) -> String {
    sizes.iter().map(u32::to_string).collect::<Vec<_>>().join("x")
}

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";
const UNSIGNED_BYTE: u8 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    struct Pair {
        folder: tempfile::TempDir,
    }

    impl Pair {
        fn path(&self, name: &str) -> String {
            self.folder.path().join(name).to_str().unwrap().to_owned()
        }

        fn source(&self) -> String {
            self.folder.path().to_str().unwrap().to_owned()
        }

        fn refusal(&self) -> String {
            IdxImages::new(2, 3).describe(&self.source()).unwrap_err().to_string()
        }
    }

    /// Three images of 2x3 pixels with consecutive values, with the labels 7, 8 and 9, modified by
    /// `change`.
    fn pair(change: impl Fn(&mut Vec<u8>, &mut Vec<u8>)) -> Pair {
        let folder = tempfile::tempdir().unwrap();
        let mut images = vec![0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 3];
        images.extend(0..18);
        let mut labels = vec![0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9];
        change(&mut images, &mut labels);
        std::fs::write(folder.path().join(IMAGES), images).unwrap();
        std::fs::write(folder.path().join(LABELS), labels).unwrap();
        Pair { folder }
    }

    #[test]
    fn a_folder_and_its_two_files_read_the_same() {
        let pair = pair(|_, _| ());
        let mut reader = IdxImages::new(2, 3);
        let dataset = reader.describe(&pair.source()).unwrap();
        let both = format!("{},{}", pair.path(IMAGES), pair.path(LABELS));
        assert_eq!(
            (dataset.files.len(), &dataset.files[0].path, dataset.files[0].records),
            (1, &both, 3)
        );
        assert_eq!(reader.describe(&both).unwrap(), dataset);
        let expected = [
            LabeledImage { pixels: (6..12).collect(), label: 8 },
            LabeledImage { pixels: (12..18).collect(), label: 9 },
        ];
        assert_eq!(IdxImages::new(2, 3).read(&dataset.files[0], 1..3).unwrap(), expected);
        assert_eq!(reader.read(&dataset.files[0], 1..1).unwrap(), []);
    }

    #[test]
    fn a_wrong_magic_number_is_refused_with_the_expected_one() {
        let swapped = pair(std::mem::swap);
        let expected = "begins with 0x00000801 where the IDX magic number 0x00000803 should be";
        assert_eq!(swapped.refusal(), format!("{}: {expected}", swapped.path(IMAGES)));
        let empty = pair(|_, labels| labels.clear());
        let expected = "begins with nothing where the IDX magic number 0x00000801 should be";
        assert_eq!(empty.refusal(), format!("{}: {expected}", empty.path(LABELS)));
        let packed = pair(|images, _| *images = vec![0x1f, 0x8b, 8, 0]);
        assert_eq!(
            packed.refusal(),
            format!("{}: compressed with gzip: decompress it first", packed.path(IMAGES))
        );
    }

    #[test]
    fn a_wrong_length_is_refused_with_the_expected_one() {
        let short = pair(|images, _| images.truncate(33));
        let expected = "33 bytes where the 3 records that it declares need 34";
        assert_eq!(short.refusal(), format!("{}: {expected}", short.path(IMAGES)));
        let long = pair(|_, labels| labels.push(0));
        let expected = "12 bytes where the 3 records that it declares need 11";
        assert_eq!(long.refusal(), format!("{}: {expected}", long.path(LABELS)));
        let cut = pair(|images, _| images.truncate(10));
        assert_eq!(
            cut.refusal(),
            format!("{}: 10 bytes where the header alone has 16", cut.path(IMAGES))
        );
        let huge = pair(|images, _| images[4..8].fill(0xff));
        let expected = "34 bytes where the 4294967295 records that it declares need 25769803786";
        assert_eq!(huge.refusal(), format!("{}: {expected}", huge.path(IMAGES)));
    }

    #[test]
    fn images_of_another_size_are_refused() {
        let pair = pair(|_, _| ());
        let error = IdxImages::new(28, 28).describe(&pair.source()).unwrap_err().to_string();
        let expected = "images of 2x3 pixels where they should be of 28x28";
        assert_eq!(error, format!("{}: {expected}", pair.path(IMAGES)));
    }

    #[test]
    fn fewer_labels_than_images_are_refused() {
        let pair = pair(|_, labels| {
            labels[7] = 2;
            labels.pop();
        });
        let expected =
            format!("{}: 2 labels for the 3 images of {}", pair.path(LABELS), pair.path(IMAGES));
        assert_eq!(pair.refusal(), expected);
    }

    #[test]
    fn a_source_that_is_not_a_pair_of_files_is_refused_with_the_syntax() {
        let pair = pair(|images, labels| {
            images.truncate(16);
            images[7] = 0;
            labels.truncate(8);
            labels[7] = 0;
        });
        assert_eq!(pair.refusal(), format!("{}: no image", pair.source()));
        let refusal = |source: &str| IdxImages::new(2, 3).describe(source).unwrap_err().to_string();
        let right = "give a folder or two files as images,labels";
        assert_eq!(
            refusal(&pair.path(IMAGES)),
            format!("{}: one file: {right}", pair.path(IMAGES))
        );
        assert_eq!(refusal("a,b,c"), format!("a,b,c: 2 commas where one should be: {right}"));
        for source in ["/nowhere/at all", "/nowhere/at all,/nowhere/either"] {
            assert!(
                matches!(IdxImages::new(2, 3).describe(source), Err(DataError::Io { .. })),
                "{source}"
            );
        }
        std::fs::remove_file(pair.path(LABELS)).unwrap();
        assert!(refusal(&pair.source()).contains("it was deleted or moved"));
    }
}
