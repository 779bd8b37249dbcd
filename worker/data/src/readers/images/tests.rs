use std::io::Write as _;

use super::*;

/// A PNG image of 2 by 3 pixels, height by width, whose red values count from `first`.
pub(in crate::readers) fn png(first: u8) -> Vec<u8> {
    encoded(2, |i| vec![first + i, 0, 7])
}

/// A PNG image of 2 by 3 pixels; `colour_type` as the format numbers them.
fn encoded(colour_type: u8, pixel: impl Fn(u8) -> Vec<u8>) -> Vec<u8> {
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut add = |kind: &[u8; 4], content: &[u8]| {
        let mut sum = flate2::Crc::new();
        sum.update(kind);
        sum.update(content);
        png.extend((content.len() as u32).to_be_bytes());
        png.extend([&kind[..], content].concat());
        png.extend(sum.sum().to_be_bytes());
    };
    add(b"IHDR", &[0, 0, 0, 3, 0, 0, 0, 2, 8, colour_type, 0, 0, 0]);
    let row = |y: u8| [vec![0], (0..3).flat_map(|x| pixel(3 * y + x)).collect()].concat();
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&[row(0), row(1)].concat()).unwrap();
    add(b"IDAT", &packed.finish().unwrap());
    add(b"IEND", &[]);
    png
}

/// Images of 2 by 3 pixels, encoded by libjpeg with quality 100: gray 9, and (200, 100, 50).
const JPEGS: [&[u8]; 2] = [include_bytes!("gray.jpg"), include_bytes!("colour.jpg")];

fn folder(files: &[(&str, &[u8])]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    for (path, bytes) in files {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let source = folder.path().to_str().unwrap().to_owned();
    (folder, source)
}

fn reader() -> ImageFolder {
    ImageFolder::new([2, 3, 3], ["cat", "dog"])
}

fn configured(purpose: Purpose, bad_records_max: u64) -> ImageFolder {
    let mut reader = reader();
    reader.configure(ReadOptions { purpose, bad_records_max }).unwrap();
    reader
}

#[test]
fn images_are_records_with_the_class_of_their_folder() {
    let (_folder, source) = folder(&[
        ("dog/a/2.png", &png(20)),
        ("cat/9.PNG", &png(90)),
        ("dog/1.png", &png(10)),
        ("dog/readme.txt", b"no image"),
    ]);
    let mut reader = reader();
    let dataset = reader.describe(&source).unwrap();
    let [file] = &dataset.files[..] else { panic!("{dataset:?}") };
    assert_eq!((&file.path, file.records), (&source, 3));
    let pixels = |first: u8| (0..6).flat_map(|i| [first + i, 0, 7]).collect::<Vec<u8>>();
    let image =
        |first, class, path: &str| ClassImage { pixels: pixels(first), class, path: path.into() };
    let all = [image(90, 0, "cat/9.PNG"), image(10, 1, "dog/1.png"), image(20, 1, "dog/a/2.png")];
    assert_eq!(reader.read(file, 0..3).unwrap(), all);
    // Another worker's reader.
    assert_eq!(self::reader().read(file, 1..2).unwrap(), all[1..2]);
    assert_eq!(
        self::reader().read_records(file, &[0, 2]).unwrap(),
        [all[0].clone(), all[2].clone()]
    );
}

#[test]
fn gray_and_colour_images_become_what_is_requested() {
    let files: [(&str, &[u8]); 6] = [
        ("cat/a.jpg", JPEGS[0]),
        ("cat/b.jpeg", JPEGS[1]),
        ("cat/c.png", &encoded(0, |_| vec![9])),
        ("cat/d.png", &encoded(4, |_| vec![9, 128])),
        ("cat/e.png", &encoded(2, |_| vec![200, 100, 50])),
        ("cat/f.png", &encoded(6, |_| vec![200, 100, 50, 0])),
    ];
    let (_folder, source) = folder(&files);
    let (gray, colour) = ([9, 9, 9], [200, 100, 50]);
    for (channels, expected) in [(3, [gray, colour]), (1, [[9; 3], [124; 3]])] {
        let mut reader = ImageFolder::new([2, 3, channels], ["cat"]);
        let dataset = reader.describe(&source).unwrap();
        let images = reader.read(&dataset.files[0], 0..6).unwrap();
        for (image, i) in images.iter().zip([0, 1, 0, 0, 1, 1]) {
            let expected = expected[i][..channels].repeat(6);
            // JPEG rounds.
            let near = |(a, b): (&u8, &u8)| a.abs_diff(*b) <= 1;
            let is_near = image.pixels.len() == expected.len()
                && image.pixels.iter().zip(&expected).all(near);
            assert!(is_near, "{i}, {channels} channels: {:?}", image.pixels);
        }
    }
}

#[test]
fn an_image_that_does_not_fit_is_an_error_that_names_it() {
    let refusal = |reader: ImageFolder, files: &[(&str, &[u8])]| {
        let (_folder, source) = folder(files);
        let mut reader = reader;
        reader.describe(&source).unwrap_err().to_string().replace(&source, "")
    };
    let large = || ImageFolder::new([4, 3, 3], ["cat", "dog"]);
    let expected = "an image of 2x3 pixels (height, width) where one of 4x3 should be";
    assert_eq!(refusal(large(), &[("cat/1.png", &png(1))]), format!("/cat/1.png: {expected}"));
    assert_eq!(
        refusal(reader(), &[("cat/1.png", b"GIF89a")]),
        "/cat/1.png: neither a PNG nor a JPEG image"
    );
    let (png, jpeg) = (png(1), JPEGS[1]);
    let mut damaged = png.clone();
    damaged[45] ^= 1;
    for bytes in [&png[..50], &damaged, &jpeg[..jpeg.len() - 10], &jpeg[..20], b"\x89PNG\r\n\x1a\n"]
    {
        let cut = refusal(reader(), &[("cat/1.png", bytes)]);
        assert!(cut.starts_with("/cat/1.png: the image cannot be decoded: "), "{cut}");
    }
    assert_eq!(
        refusal(reader(), &[("cow/1.png", &png)]),
        "/cow/1.png: the folder \"cow\" is none of the classes cat, dog"
    );
    assert_eq!(
        refusal(reader(), &[("1.png", &png)]),
        "/1.png: it is in no folder of a class: cat, dog"
    );
}

#[test]
fn bad_images_are_left_out_up_to_a_limit() {
    let (_folder, source) =
        folder(&[("cat/1.png", &png(1)), ("cat/2.png", b"x"), ("dog/3.png", &png(3))]);
    let mut reader = configured(Purpose::Train, 1);
    let dataset = reader.describe(&source).unwrap();
    assert_eq!((dataset.files[0].records, dataset.skipped.bad), (2, 1));
    let expected = format!("{source}/cat/2.png: neither a PNG nor a JPEG image");
    assert_eq!(dataset.skipped.first, [expected]);
    let images = configured(Purpose::Train, 1).read(&dataset.files[0], 0..2).unwrap();
    assert_eq!(images.iter().map(|image| image.class).collect::<Vec<_>>(), [0, 1]);
    std::fs::write(format!("{source}/dog/4.png"), b"y").unwrap();
    let error = configured(Purpose::Train, 1).describe(&source).unwrap_err().to_string();
    let expected = "neither a PNG nor a JPEG image; it is bad record 2, and --bad-records skips 1";
    assert!(error.starts_with(&format!("{source}/dog/4.png: {expected}")), "{error}");
}

#[test]
fn predictions_need_no_class() {
    let (_folder, source) = folder(&[("b.png", &png(2)), ("dog/a.png", &png(1))]);
    let mut reader = configured(Purpose::Predict, 0);
    let dataset = reader.describe(&source).unwrap();
    let images = reader.read(&dataset.files[0], 0..2).unwrap();
    assert_eq!(images.iter().map(|image| image.class).collect::<Vec<_>>(), [0, 1]);
    let one = format!("{source}/b.png");
    let dataset = reader.describe(&one).unwrap();
    assert_eq!(reader.read(&dataset.files[0], 0..1).unwrap()[0].pixels[0], 2);
}

#[test]
fn images_that_were_added_since_the_description_are_an_error() {
    let (_folder, source) = folder(&[("cat/1.png", &png(1))]);
    let dataset = reader().describe(&source).unwrap();
    std::fs::write(format!("{source}/cat/0.png"), png(9)).unwrap();
    let error = reader().read(&dataset.files[0], 0..1).unwrap_err();
    assert!(matches!(error, DataError::Changed { .. }), "{error}");
}
