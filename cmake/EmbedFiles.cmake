# moesaic_embed_page(FOLDER OUTPUT)
#   writes the C++ file OUTPUT that holds the web page of FOLDER and the JavaScript libraries that
#   FOLDER/package-lock.json locks (declared in src/server/web_files.h). The libraries are installed by npm into the
#   build folder, again only when the lock file changes. Without npm the page is built without them.
find_program(NPM_PROGRAM npm)

function(moesaic_embed_page folder output)
  if(NOT NPM_PROGRAM)
    message(WARNING "npm is not installed: the web page shows plain text, without Markdown, math and charts. "
                    "Install nodejs and npm, then run cmake again.")
  endif()
  file(GLOB_RECURSE files CONFIGURE_DEPENDS LIST_DIRECTORIES false ${folder}/*.html ${folder}/*.css ${folder}/*.svg ${folder}/*.js)
  set(libraries ${CMAKE_BINARY_DIR}/web/libraries)
  set(stamp ${CMAKE_BINARY_DIR}/web/libraries.stamp)
  add_custom_command(
    OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${folder} -DNPM=$<$<BOOL:${NPM_PROGRAM}>:${NPM_PROGRAM}> -DOUTPUT=${libraries} -DSTAMP=${stamp}
            -P ${CMAKE_SOURCE_DIR}/cmake/web_libraries.cmake
    DEPENDS ${folder}/package.json ${folder}/package-lock.json ${CMAKE_SOURCE_DIR}/cmake/web_libraries.cmake
    COMMENT "Installing the libraries of the web page" VERBATIM)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} "-DFOLDERS=${folder}$<SEMICOLON>${libraries}" -DPACKED=${CMAKE_BINARY_DIR}/web/packed -DOUTPUT=${output}
            -P ${CMAKE_SOURCE_DIR}/cmake/embed_files.cmake
    DEPENDS ${files} ${stamp} ${CMAKE_SOURCE_DIR}/cmake/embed_files.cmake
    COMMENT "Embedding the web page" VERBATIM)
endfunction()
